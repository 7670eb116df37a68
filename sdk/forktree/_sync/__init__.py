# Generated from sdk/forktree/_async/__init__.py by `make generate`; change that file.
"""The client, written once: `_sync` is generated from this folder by `make generate`."""
