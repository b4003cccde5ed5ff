"""What a step gets: the sample plan, symmetries, loaders and data sets for classification."""
