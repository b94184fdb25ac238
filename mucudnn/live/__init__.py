"""Measuring on a device that is here: operands and calls to time, references, turns."""
