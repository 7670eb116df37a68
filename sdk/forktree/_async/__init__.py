"""The client, written once: `_sync` is generated from this folder by `make generate`."""
