"""The bridge between PyTorch and JAX for people who train models."""

from dew.api import adapt as adapt
from dew.api import certify as certify
from dew.api import extend_vocabulary as extend_vocabulary
from dew.api import load as load
from dew.api import pad_vocabulary as pad_vocabulary
from dew.api import save as save
from dew.converters.lora.config import Lora as Lora
