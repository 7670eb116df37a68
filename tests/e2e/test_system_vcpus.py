"""A session with two vCPUs in a whole system: forked over HTTP and by an object, in mid-work."""

from __future__ import annotations

import asyncio

import pytest

from e2e.whole import Whole

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORK = "for way in a b; do (i=0; while :; do i=$((i+1)); echo $i > /tmp/$way; done) & done >/dev/null 2>&1"
"""As many programs as there are vCPUs, which never stand still by themselves."""
COUNTS = 'was=$(cat /tmp/{way}); until [ "$(cat /tmp/{way})" != "$was" ]; do :; done'


@pytest.mark.timeout(500)
async def test_children_of_two_vcpus_answer_as_themselves_and_their_programs_go_on(whole: Whole) -> None:
    await whole.template("two", machine={"memory": "128Mi", "vcpus": 2})
    await whole.session("root", "two")
    assert await whole.sh("root", "nproc") == "2\n"
    await whole.sh("root", WORK)
    status, forked = await whole.post("sessions/root/fork?record=wait", {"replicas": 1, "name": "asked"})
    assert status == 201, forked
    (over_http,) = (each["session_id"] for each in forked["children"])
    (by_object,) = await whole.forked("applied")
    go_on = "; ".join(COUNTS.format(way=way) for way in "ab")
    names = ("root", over_http, by_object)
    said = await asyncio.gather(*(whole.sh(name, f"{go_on}; hostname; nproc") for name in names))
    assert said == [f"{name}\n2\n" for name in names]
