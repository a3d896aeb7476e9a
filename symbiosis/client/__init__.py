"""A client: an ordinary transformers/PEFT program whose frozen layers are proxies."""

from symbiosis import requirements

requirements.check()
