"""Measure attention: device time, TFLOP/s, memory and error of every kernel that runs here."""
