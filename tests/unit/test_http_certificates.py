"""The self-made TLS identity: clients that hold its authority verify it, and its keys stay its own."""

from __future__ import annotations

import asyncio
import ssl
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forktree_agent import __main__ as program
from forktree_agent.http import certificates
from forktree_agent.http.certificates import UnusableCertificate
from forktree_agent.main import listener
from forktree_agent.settings import Settings


@asynccontextmanager
async def listening(identity: certificates.Identity) -> AsyncGenerator[int]:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=identity.context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def verified_as(port: int, authority: Path, name: str) -> None:
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # The default of Python 3.13.
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("name", ["127.0.0.1", "node-a.example"])
async def test_a_client_verifies_the_server_by_each_of_its_names(tmp_path: Path, name: str) -> None:
    identity = certificates.self_signed(tmp_path, ["127.0.0.1", "node-a.example"])
    assert identity.authority == tmp_path / "ca.crt"
    async with listening(identity) as port:
        await verified_as(port, tmp_path / "ca.crt", name)


async def test_another_name_is_refused(tmp_path: Path) -> None:
    identity = certificates.self_signed(tmp_path, ["127.0.0.1"])
    async with listening(identity) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await verified_as(port, tmp_path / "ca.crt", "other.example")


async def test_a_restart_keeps_the_authority_that_clients_trust(tmp_path: Path) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    trusted = (tmp_path / "ca.crt").read_bytes()
    kept = tmp_path / "kept-by-a-client.crt"
    kept.write_bytes(trusted)
    again = certificates.self_signed(tmp_path, ["127.0.0.1"])
    async with listening(again) as port:
        await verified_as(port, kept, "127.0.0.1")


def test_an_authority_without_its_key_is_replaced(tmp_path: Path) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    before = (tmp_path / "ca.crt").read_bytes()
    (tmp_path / "ca.key").unlink()
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    assert (tmp_path / "ca.crt").read_bytes() != before


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


async def test_a_given_certificate_is_served_as_it_is(tmp_path: Path) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    identity = certificates.given(tmp_path / "server.crt", tmp_path / "server.key")
    assert identity.authority is None
    async with listening(identity) as port:
        await verified_as(port, tmp_path / "ca.crt", "127.0.0.1")


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_given_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    certificates.self_signed(tmp_path, ["127.0.0.1"])
    file = tmp_path / "given.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(
        UnusableCertificate, match=rf"the certificate {file} with the key .* cannot be used: "
    ):
        certificates.given(file, tmp_path / "server.key")


def test_a_key_of_another_certificate_is_one_sentence(tmp_path: Path) -> None:
    for each in ("one", "other"):
        certificates.self_signed(tmp_path / each, ["127.0.0.1"])
    with pytest.raises(UnusableCertificate, match=r"cannot be used: .*KEY_VALUES_MISMATCH"):
        certificates.given(tmp_path / "one" / "server.crt", tmp_path / "other" / "server.key")


async def test_it_is_also_for_the_names_that_the_agent_is_told(tmp_path: Path) -> None:
    settings = Settings(
        node_name="n1",
        state_directory=tmp_path,
        guest_directory=tmp_path,
        shim_library=tmp_path,
        tls_names=("forktree.ours.svc", "*.nodes.example"),
    )
    identity = certificates.self_signed(tmp_path, list(listener(settings).names))
    async with listening(identity) as port:
        for name in ("forktree.ours.svc", "a.nodes.example", "n1"):
            await verified_as(port, tmp_path / "ca.crt", name)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tls-name=a b"], "'a b' is neither a host's name nor an address"),
        (["--tls-cert=c"], "give both --tls-cert and --tls-key, or neither"),
        (
            ["--tls-cert=c", "--tls-key=k", "--tls-name=a"],
            "--tls-name is for the certificate made here: a given one has its names already",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main([*_NEEDED, *options])
    assert sentence in capsys.readouterr().err


_NEEDED = ["--node-name=n1", "--state-dir=/run/x", "--guest-dir=/g", "--shim-library=/s"]
