"""Clients of the server: `AsyncClient`, and `Client` for code without an event loop."""

from unbroken.client.async_client import AsyncClient
from unbroken.client.sync_client import Client

__all__ = ["AsyncClient", "Client"]
