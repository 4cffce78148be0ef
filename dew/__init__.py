"""The bridge between PyTorch and JAX for people who train models."""

from dew.roads import certify as certify
from dew.roads import load as load
from dew.roads import save as save
