"""The bridge between PyTorch and JAX for people who train models."""

from dew.converters.lora import Lora as Lora
from dew.roads import adapt as adapt
from dew.roads import certify as certify
from dew.roads import extend_vocabulary as extend_vocabulary
from dew.roads import load as load
from dew.roads import pad_vocabulary as pad_vocabulary
from dew.roads import save as save
