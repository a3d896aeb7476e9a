"""A client: an ordinary transformers/PEFT program whose frozen layers are proxies."""

from symbiosis.base import requirements

requirements.check()
