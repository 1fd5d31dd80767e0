"""hypic: position-independent caching for hybrid-attention LLMs, as a plugin on stock SGLang."""

__version__ = "0.1.0"
