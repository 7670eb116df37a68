"""The session templates, known by what was seen of them."""

from __future__ import annotations

from forktree.kube.client import KubeClient
from forktree.kube.errors import NotFound
from forktree.models.session_template import SessionTemplate


class Templates:
    """Every template that was seen. As many records as there are templates.

    One that was deleted unseen may still be here: the session goes to a node, whose agent then says so.
    """

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._known: dict[tuple[str, str], SessionTemplate] = {}

    def observe(self, template: SessionTemplate) -> bool:
        """Take note of a template. True if it is new."""
        key = _key(template)
        new = key not in self._known
        self._known[key] = template
        return new

    def forget(self, template: SessionTemplate) -> None:
        self._known.pop(_key(template), None)

    async def get(self, namespace: str, name: str) -> SessionTemplate | None:
        """The template, or None if there is none. Asks the API server for one that is not known: its event
        may come after that of a session that was applied together with it."""
        known = self._known.get((namespace, name))
        if known is not None:
            return known
        try:
            template = await self._client.get(SessionTemplate, namespace, name)
        except NotFound:
            return None
        self.observe(template)
        return template


def _key(template: SessionTemplate) -> tuple[str, str]:
    return (template.metadata.namespace or "", template.metadata.name)
