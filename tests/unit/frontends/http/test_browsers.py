"""Which requests of browsers are refused, and that programs are never taken for one."""

import pytest

from conch.frontends.http.browsers import BrowserRules, preflight

LOCAL = "127.0.0.1"
OPEN = "0.0.0.0"


def verdict(address: str, *allowed: str, method: bytes = b"POST", **headers: str) -> str:
    """The message that refuses a request, empty for one that is accepted."""
    sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    error = BrowserRules(address, allowed).check(method, sent)
    return "" if error is None else error.message


@pytest.mark.parametrize("address", [LOCAL, OPEN])
@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "conch", "model.localhost", ""])
def test_programs_are_accepted(address: str, host: str) -> None:
    assert verdict(address, host=host) == ""
    assert verdict(address) == ""


def test_a_page_of_another_site_changes_nothing() -> None:
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
    ):
        assert "--http-allowed-host" in verdict(OPEN, host="localhost:8000", **headers)
        assert "--http-allowed-host" in verdict(LOCAL, host="localhost:8000", **headers)


def test_pages_of_the_same_server_are_accepted() -> None:
    assert verdict(OPEN, host="conch.example", origin="https://conch.example") == ""
    # A proxy may have changed the host.
    assert verdict(LOCAL, host="127.0.0.1:8000", origin="https://conch.example", sec_fetch_site="same-origin") == ""


def test_what_no_form_can_send_is_accepted() -> None:
    """A page's own script needs the server's leave for it; a proxy on the way has often changed the host."""
    page = {"host": "127.0.0.1:8000", "origin": "https://conch.example"}
    assert verdict(LOCAL, **page, content_type="application/json; charset=utf-8") == ""
    assert verdict(LOCAL, **page, content_type="Text/Plain; charset=utf-8") != ""
    assert verdict(LOCAL, **page, content_type="") != ""


def test_what_a_page_reads_it_may_ask_for() -> None:
    assert verdict(OPEN, method=b"GET", host="localhost", origin="http://evil.example") == ""


@pytest.mark.parametrize("host", ["host.docker.internal", "conch.models.svc.cluster.local"])
def test_names_of_containers_and_clusters_are_accepted(host: str) -> None:
    """Of which proxies beside the server (Docker's, a pod's) pass requests on to this machine's address."""
    assert verdict(LOCAL, host=host + ":8000") == ""
    assert verdict(LOCAL, host=host + ".evil.example:8000") != ""


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_name_that_was_bound_to_this_machine_is_not_its_own(method: bytes) -> None:
    assert "evil.example" in verdict(LOCAL, method=method, host="evil.example:8000", sec_fetch_site="same-origin")
    assert verdict(OPEN, method=method, host="conch.example") == ""


def test_further_hosts_may_be_allowed() -> None:
    assert verdict(LOCAL, "Conch.example", host="conch.example") == ""
    assert verdict(LOCAL, "app.example", host="localhost", origin="https://app.example:8443") == ""
    assert verdict(LOCAL, "app.example", host="localhost", origin="https://other.example") != ""
    assert verdict(LOCAL, "*", host="evil.example", origin="https://evil.example", sec_fetch_site="cross-site") == ""


def test_hosts_that_are_asked_for_are_remembered_in_bounds() -> None:
    kept = 0

    class Host(bytes):
        def __init__(self, name: bytes) -> None:
            nonlocal kept
            kept += 1

        def __del__(self) -> None:
            nonlocal kept
            kept -= 1

    rules = BrowserRules(LOCAL, ())
    for number in range(1000):
        assert rules.check(b"GET", {b"host": Host(b"h%d" % number)}) is None
    assert kept <= 256


def test_pages_of_named_origins_read_responses() -> None:
    rules = BrowserRules(LOCAL, (), ("https://chat.example", "http://localhost:3000"))

    def origin(*, named: str) -> bytes | None:
        return dict(rules.cors_headers({b"origin": named.encode()})).get(b"Access-Control-Allow-Origin")

    assert origin(named="https://chat.example") == b"https://chat.example"
    for other in ("http://chat.example", "https://chat.example:444", "https://chat.example.evil", "null", "*", ""):
        assert origin(named=other) is None
    assert rules.cors_headers({}) == []
    assert (b"Vary", b"Origin") in rules.cors_headers({b"origin": b"http://localhost:3000"})
    assert BrowserRules(LOCAL, ()).cors_headers({b"origin": b"http://localhost:3000"}) == []


def test_pages_of_named_origins_send_forms() -> None:
    rules = BrowserRules(LOCAL, (), ("https://chat.example",))
    page = {b"host": b"localhost:8000", b"sec-fetch-site": b"cross-site", b"content-type": b"multipart/form-data"}
    assert rules.check(b"POST", {**page, b"origin": b"https://chat.example"}) is None
    assert rules.check(b"POST", {**page, b"origin": b"https://evil.example"}) is not None
    rebound = {**page, b"origin": b"https://chat.example", b"host": b"evil.example"}
    assert rules.check(b"POST", rebound) is not None


def test_any_origin_has_no_credentials() -> None:
    headers = dict(BrowserRules(LOCAL, (), ("*",)).cors_headers({b"origin": b"https://a.example"}))
    assert headers[b"Access-Control-Allow-Origin"] == b"*"
    assert b"Access-Control-Allow-Credentials" not in headers


def test_preflight_names_methods_and_headers() -> None:
    asked = {b"access-control-request-method": b"POST", b"access-control-request-headers": b"authorization,x-stainless"}
    headers = dict(preflight(b"OPTIONS", asked, {b"POST": 1, b"GET": 1}))
    assert headers[b"Access-Control-Allow-Methods"] == b"GET, POST"
    assert headers[b"Access-Control-Allow-Headers"] == b"authorization,x-stainless"
    assert preflight(b"POST", asked, [b"POST"]) == preflight(b"OPTIONS", {}, [b"POST"]) == []
    odd = {**asked, b"access-control-request-headers": b"a\x00b"}
    assert dict(preflight(b"OPTIONS", odd, [b"POST"]))[b"Access-Control-Allow-Headers"] == b""
