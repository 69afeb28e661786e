"""Products of fp8 and int8 operands with scales: :func:`costmodel.scaled_mm`."""
