"""All transports that need nothing of a particular engine: the kinds of source, and the receiver of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unbroken.transfer.announcement import Announcement
from unbroken.transfer.broadcast import BroadcastReceiver
from unbroken.transfer.files import FileReceiver, FileSource
from unbroken.transfer.memory import MemoryReceiver, MemorySource
from unbroken.transfer.sources import Receiver, TensorReceiver, TensorSource, WeightSource

RECEIVERS: Mapping[type[WeightSource], type[Receiver[Any]]] = {
    TensorSource: TensorReceiver,
    FileSource: FileReceiver,
    MemorySource: MemoryReceiver,
    Announcement: BroadcastReceiver,
}
"""A new transport adds its line here."""
