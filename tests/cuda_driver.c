/* A GPU for PyTorch to see where there is none, so that a CUDA build makes its choices on tensors without data.
 *
 * Preloaded, it answers what PyTorch asks before it launches anything: one device like an H100, idle streams, events
 * that have happened. All other calls reach the CUDA runtime, which fails without a driver: nothing can be computed,
 * copied or waited for.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <string.h>

cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "no GPU");
  properties->major = 9;
  properties->totalGlobalMem = (size_t)80 << 30;
  properties->multiProcessorCount = 132;
  properties->sharedMemPerBlockOptin = 227 << 10;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

static char streams[1024], events[65536];
static int stream_count, event_count;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  if (stream_count == sizeof streams)
    return cudaErrorMemoryAllocation;
  *stream = (cudaStream_t)&streams[stream_count++];
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  if (event_count == sizeof events)
    return cudaErrorMemoryAllocation;
  *event = (cudaEvent_t)&events[event_count++];
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 0;
  return CUDA_SUCCESS;
}
