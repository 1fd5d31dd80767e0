"""The errors of data sets."""


class DataError(ValueError):
    """Data that cannot be had, read or written for the model; the text names the input and the remedy."""
