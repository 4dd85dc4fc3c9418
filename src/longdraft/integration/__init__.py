"""``model.generate(..., custom_generate=speculator)``."""

from __future__ import annotations

from longdraft.integration.decoding import decode
from longdraft.integration.handover import Given, HandedOver, streaming

__all__ = ["Given", "HandedOver", "decode", "streaming"]
