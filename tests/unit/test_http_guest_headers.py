"""What passes between a caller and a guest's server, and what of it must not."""

from __future__ import annotations

import pytest

from forktree_agent.http.guest_headers import (
    FROM_SESSION,
    SANDBOX,
    from_agent,
    from_guest,
    location,
    to_guest,
)

PREFIX = "/ns/team/v1/sessions/a/ports/web"
AGENT = "agent.example:7443"


def sent(*headers: tuple[str, str], is_upgrade: bool = False) -> dict[str, str]:
    found = list(
        to_guest(
            list(headers), authority="localhost:80", prefix=PREFIX, asked_at=AGENT, is_upgrade=is_upgrade
        )
    )
    assert len({name.lower() for name, _ in found}) == len(found)
    return {name.lower(): value for name, value in found}


def told(*headers: tuple[str, str]) -> dict[str, list[str]]:
    found = from_guest(
        list(headers), session="a", prefix=PREFIX, path="/x/y", ports=frozenset({"80"}), asked_at=AGENT
    )
    return {name.lower(): found.getall(name) for name in found}


def test_nothing_that_is_the_agents_goes_to_a_guest() -> None:
    seen = sent(
        ("Host", AGENT),
        ("Authorization", "Bearer secret"),
        ("Proxy-Authorization", "secret"),
        ("Cookie", "secret"),
        ("Forktree-Handed-On-By", "node"),
        ("X-Forwarded-For", "10.0.0.1"),
        ("Forwarded", "for=x"),
        ("Connection", "keep-alive, X-Mine"),
        ("X-Mine", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "3"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "x"),
        ("TE", "trailers"),
        ("Expect", "100-continue"),
        ("Accept", "text/html"),
    )
    assert seen == {
        "host": "localhost:80",
        "accept": "text/html",
        "x-forwarded-proto": "https",
        "x-forwarded-host": AGENT,
        "x-forwarded-prefix": PREFIX,
        "connection": "close",
    }
    assert sent(("Upgrade", "websocket"), is_upgrade=True)["upgrade"] == "websocket"


def test_no_header_can_be_named_away_to_let_another_pass() -> None:
    assert "authorization" not in sent(("Connection", "close"), ("authorization", "Bearer secret"))
    assert "cookie" not in sent(("COOKIE", "secret"))


def test_what_a_guest_sets_of_the_origin_is_left_out() -> None:
    seen = told(
        ("Set-Cookie", "a"),
        ("set-cookie", "b"),
        ("Alt-Svc", 'h2="evil:443"'),
        ("Clear-Site-Data", "*"),
        ("WWW-Authenticate", "Basic"),
        ("Refresh", "0; url=/"),
        (FROM_SESSION, "another"),
        ("X-Request-Id", "guess"),
        ("Content-Type", "text/html"),
        ("Content-Security-Policy", "default-src *"),
        ("Link", "</a>; rel=next"),
        ("Link", "</b>; rel=prev"),
    )
    assert seen == {
        "content-type": ["text/html"],
        "content-security-policy": ["default-src *", SANDBOX],
        "link": ["</a>; rel=next", "</b>; rel=prev"],
        FROM_SESSION.lower(): ["a"],
        "x-content-type-options": ["nosniff"],
    }


def test_a_length_beside_chunks_is_no_length() -> None:
    assert "content-length" not in told(("Content-Length", "5"), ("Transfer-Encoding", "chunked"))
    assert told(("Content-Length", "5"))["content-length"] == ["5"]


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("/login", f"{PREFIX}/login"),
        ("next?a=b#c", f"{PREFIX}/x/next?a=b#c"),
        ("?again", f"{PREFIX}/x/y?again"),
        ("http://localhost:80/z", f"{PREFIX}/z"),
        ("http://127.0.0.1/z", f"{PREFIX}/z"),
        ("//localhost:80", f"{PREFIX}/"),
        ("https://elsewhere.example/a", "https://elsewhere.example/a"),
        # Never up and out of its own part of the agent's paths.
        ("/../../../exec", f"{PREFIX}/exec"),
        ("/%2e%2E/.%2e/exec", f"{PREFIX}/exec"),
        ("../../../../exec/..", f"{PREFIX}/"),
        ("///ns/other/v1", f"{PREFIX}/ns/other/v1"),
        # Nor to the agent by its own name, however that is written.
        (f"https://{AGENT}/ns/other/v1/sessions", None),
        ("https://AGENT.example:7443/", None),
        (f"https://user@{AGENT}/", None),
        (f"//{AGENT}/", None),
        ("https://agent.example:9/", None),
        ("/\\agent.example/", None),
        ("https://elsewhere.example\\@agent.example/", None),
        ("/a b", None),
        ("/a\tb", None),
        ("/ä", None),
        ("javascript:alert(1)", None),
        ("https:///x", None),
        ("http://[/", None),
        ("http://localhost:80000/", None),
    ],
)
def test_a_redirect_leads_to_the_server_itself_or_away_from_the_agent(said: str, where: str | None) -> None:
    found = location(said, prefix=PREFIX, path="/x/y", ports=frozenset({"80"}), asked_at=AGENT)
    assert found == where


@pytest.mark.parametrize(
    ("asked_at", "said"),
    [
        ("10.0.0.5:7443", "https://167772165:7443/"),
        ("10.0.0.5:7443", "https://10.0.5:7443/"),
        ("10.0.0.5:7443", "https://0xa000005:7443/"),
        ("10.0.0.5:7443", "https://0XA.0.0.5:7443/"),
        ("10.0.0.5:7443", "https://10.0.0.0x5/"),
        ("10.0.0.5:7443", "https://012.0.0.5/"),
        ("10.0.0.5:7443", "https://10.0.0.%35:7443/"),
        ("10.0.0.5:7443", "https://10.0.0.5.:7443/"),
        ("10.0.0.5:7443", "https://10.0.0.5..:7443/"),
        ("10.0.0.5:7443", "https://[::ffff:10.0.0.5]:7443/"),
        ("10.0.0.5:7443", "https://[::ffff:a00:5]:7443/"),
        ("10.0.0.5:7443", "//0xa000005/"),
        ("10.0.0.5:7443", "https://:7443/"),
        ("10.0.5:7443", "https://10.0.0.5:7443/"),
        ("10.0.0.5.:7443", "https://10.0.0.5:7443/"),
        ("[fd00::5]:7443", "https://[fd00:0::5]:7443/"),
        ("[fd00::5]:7443", "https://[FD00:0:0:0:0:0:0:5]/"),
        ("[fd00::5]:7443", "https://[fd00::5%25eth0]/"),
        ("localhost:7443", "https://127.0.0.1:7443/"),
        ("localhost:7443", "https://127.1:7443/"),
        ("127.0.0.1:7443", "https://[::1]:7443/"),
        ("127.0.0.1:7443", "https://0.0.0.0:7443/"),
        ("127.0.0.1:7443", "https://a.localhost:7443/"),
        (AGENT, "https://agent.example.:7443/"),
        (AGENT, "https://agent%2eexample/"),
        ("", "https://example.com/"),
    ],
)
def test_no_spelling_of_the_agents_address_leads_back_to_it(asked_at: str, said: str) -> None:
    """Clients take more spellings for one host than one, and send the token to it."""
    assert location(said, prefix=PREFIX, path="/", ports=frozenset({"80"}), asked_at=asked_at) is None
    assert "Location" not in from_agent([("Location", said)], asked_at=asked_at)


@pytest.mark.parametrize("asked_at", ["10.0.0.5:7443", "[fd00::5]:7443", AGENT, "localhost:7443"])
@pytest.mark.parametrize(
    "said",
    [
        "https://10.0.0.6/",
        "https://example.com/",
        "https://example.com./%35?a=%2e",
        "https://[fd00::6]:7443/",
        "https://5.example.com/",
        "//a_b.example/",
    ],
)
def test_a_redirect_to_another_host_stays_as_it_is(asked_at: str, said: str) -> None:
    assert location(said, prefix=PREFIX, path="/", ports=frozenset({"80"}), asked_at=asked_at) == said


def test_no_redirect_leads_back_through_another_agent() -> None:
    """Whose host the first one knows, and the second one does not."""
    assert "Location" not in from_agent([("Location", f"https://{AGENT}/ns")], asked_at=AGENT)
    kept = from_agent([("Location", f"{PREFIX}/a"), ("Connection", "close")], asked_at=AGENT)
    assert dict(kept) == {"Location": f"{PREFIX}/a"}
