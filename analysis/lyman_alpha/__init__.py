"""The flux of the Lyman-alpha forest: its statistics in a simulated volume."""
