"""Channels: clipping, noise, compression and attacks applied to replies."""

from consilience.channel.chain import Chain
from consilience.channel.clip import Clip
from consilience.channel.noise import Noise
from consilience.channel.quantise import Quantise
from consilience.channel.radio import OverTheAir, Radio
from consilience.channel.sparsify import RandomK, TopK
from consilience.core.algorithm import Plain

__all__ = ["Chain", "Clip", "Noise", "OverTheAir", "Plain", "Quantise", "Radio", "RandomK", "TopK"]
