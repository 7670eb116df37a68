"""Names of images and registries, addresses that may be asked, and logins of Secrets."""

from __future__ import annotations

import base64
import ipaddress
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as some
from yarl import URL

from forktree.models.session_template import IMAGE_PATTERNS
from forktree_agent.images.credentials import Login, NoLogins, login_for
from forktree_agent.images.errors import ImageInvalid, ImagePullFailed, cleaned
from forktree_agent.images.reaching import Rule, is_public
from forktree_agent.images.references import Place, parse_named_registry, parse_reference

DIGEST = "sha256:" + "0123456789abcdef" * 4
REFERENCES = {
    "oci:registry.example.com/app": ("registry.example.com", "app", "latest"),
    "oci:registry.example.com/team/app:1.2": ("registry.example.com", "team/app", "1.2"),
    f"oci:10.0.0.1:5000/a/b_c/d--e@{DIGEST}": ("10.0.0.1:5000", "a/b_c/d--e", DIGEST),
    f"oci:localhost:5000/app:tag@{DIGEST}": ("localhost:5000", "app", DIGEST),
    "oci:docker.io/python:3.12": ("docker.io", "library/python", "3.12"),
    "oci:docker.io/team/app": ("docker.io", "team/app", "latest"),
    "oci:Registry.Example.COM/app": ("registry.example.com", "app", "latest"),
}
NO_REFERENCES = (
    "oci:", "oci:app", "oci:/app", "oci:host/", "oci:host/App", "oci:host//app", "oci:host/a/../b",
    "oci:host/./a", "oci:host:/app", "oci:host:x/app", "oci:host/app:", "oci:host/app@sha256:00",
    "oci:host/app@md5:00",
    "oci:user@host/app", "oci:http://host/app", "oci:-host/app", "oci:host/app ", "oci:host/app\n", "app", "",
    "oci:host/app?x", "oci:host/app#x", "oci:host/a%2fb", "oci:[::1]/app", "oci:host/" + "a" * 600,
)  # fmt: skip


@pytest.mark.parametrize("text", REFERENCES)
def test_a_reference_names_a_registry_a_repository_and_a_manifest(text: str) -> None:
    found = parse_reference(text)
    assert (found.registry, found.repository, found.manifest) == REFERENCES[text]
    assert any(re.fullmatch(pattern, text) for pattern in IMAGE_PATTERNS)


@pytest.mark.parametrize("text", NO_REFERENCES)
def test_what_is_no_reference_is_refused_here_and_by_the_api_server(text: str) -> None:
    with pytest.raises(ImageInvalid, match="names no image"):
        parse_reference(text)
    assert len(text) > 512 or not any(re.fullmatch(pattern, text) for pattern in IMAGE_PATTERNS)


@given(some.from_regex(re.compile("|".join(IMAGE_PATTERNS)), fullmatch=True))
def test_what_the_api_server_takes_can_be_read(text: str) -> None:
    if not text.startswith("oci:") or not text.isascii() or len(text) > 512:
        return
    port = re.match(r"oci:[^/]*:(\d+)/", text)
    if port is None or 0 < int(port[1]) <= 65535:
        assert parse_reference(text).text == text


@pytest.mark.parametrize(
    ("text", "host", "port", "scheme"),
    [
        ("registry.internal", "registry.internal", 443, "https"),
        ("Registry.internal:5000", "registry.internal", 5000, "https"),
        ("registry.internal=http", "registry.internal", 80, "http"),
        ("[fd00::1]:5000=http", "fd00::1", 5000, "http"),
        ("docker.io", "registry-1.docker.io", 443, "https"),
    ],
)
def test_an_operator_names_a_registry(text: str, host: str, port: int, scheme: str) -> None:
    named = parse_named_registry(text)
    assert (named.place, named.scheme) == (Place(host, port), scheme)


@pytest.mark.parametrize(
    "text", ["", "https://host", "host:0", "host:70000", "host=https", "host/path", "a b"]
)
def test_what_names_no_registry_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST"):
        parse_named_registry(text)


PUBLIC = ("8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808")
NOT_PUBLIC = (
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "224.0.0.1", "239.1.1.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1",
    "::", "::1", "fe80::1", "fc00::1", "fd12::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1", "2002:7f00:1::1", "2002:a00:1::", "2001:db8::1", "2001:0:7f00:1::1",
)  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_asked(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_other_addresses_are_not(text: str) -> None:
    address = ipaddress.ip_address(text)
    assert not is_public(address)
    host = f"[{text}]" if address.version == 6 else text
    with pytest.raises(ImagePullFailed, match="is not at a public address"):
        Rule((), only_named=False).check(URL(f"https://{host}/v2/"))


def test_a_named_registry_is_asked_where_it_is_and_only_there() -> None:
    rule = Rule([parse_named_registry("127.0.0.1:5000=http")], only_named=False)
    rule.check(URL("http://127.0.0.1:5000/v2/"))
    for url in (
        "http://127.0.0.1:5001/",
        "https://127.0.0.1:5000/",
        "https://127.0.0.1/",
        "http://127.0.0.1/",
    ):
        with pytest.raises(ImagePullFailed):
            rule.check(URL(url))
    assert str(rule.base(parse_reference("oci:127.0.0.1:5000/app"))) == "http://127.0.0.1:5000"
    assert str(rule.base(parse_reference("oci:registry.example.com/app"))) == "https://registry.example.com"


def test_an_address_with_a_login_in_it_is_not_asked() -> None:
    with pytest.raises(ImagePullFailed, match="no https address"):
        Rule((), only_named=False).check(URL("https://me:secret@registry.example.com/"))


def test_the_login_for_a_registry_is_found_however_it_was_written() -> None:
    auth = base64.b64encode(b"me:se:cret").decode()
    for name, registry in (
        ("registry.example.com", "registry.example.com"),
        ("https://registry.example.com/v2/", "registry.example.com"),
        ("registry.example.com:5000/team", "registry.example.com:5000"),
        ("https://index.docker.io/v1/", "docker.io"),
    ):
        for entry in ({"auth": auth}, {"username": "me", "password": "se:cret"}):
            text = json.dumps({"auths": {"other": {}, name: entry}}).encode()
            assert login_for(registry, text) == Login("me", "se:cret")
    assert login_for("elsewhere", text) is None
    assert "se:cret" not in repr(Login("me", "se:cret"))


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"auths": []}', b"\xff", b'{"auths": {"here": {"auth": "%%"}}}']
)
def test_what_holds_no_logins_is_told_without_what_it_holds(text: bytes) -> None:
    with pytest.raises(NoLogins) as failed:
        login_for("here", text)
    assert "%%" not in str(failed.value)


@given(some.text())
def test_what_strangers_say_is_one_line_of_bounded_length(text: str) -> None:
    assert len(cleaned(text)) <= 303
    assert cleaned(text).isascii() and cleaned(text).isprintable()
