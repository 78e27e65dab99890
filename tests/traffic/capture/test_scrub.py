"""Nothing secret is left, nothing else is changed, and nothing gets longer or shorter."""

import base64
import gzip
import json
from collections import Counter
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.traffic.capture.scrub import Scrubber, Unscrubbable
from harness.traffic.recording import Answered, Recorded

SCRUBBER = Scrubber(b"salt", fields=("badge",), names=("x-chat",))
SECRETS = [
    "sk-proj-abcDEF1234567890abcd", "hf_abcdefghijklmnopqrstuvwx", "AKIAIOSFODNN7EXAMPLE",
    "ghp_16C7e42F292c6912E7710c838",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4", "john.doe+x@mail.example.org", "+49 170 1234567",
    "(415) 555-2671", "415-555-2671", "13812345678", "0170 12345678", "030/1234567",
    "4111 1111 1111 1111", "5500005555555559", "078-05-1120",
    "11010519491231002X", "DE89370400440532013000",
]  # fmt: skip
HARMLESS = [
    "task-description_of_a_thing", "risk-adjusted-returns-of-2024", "0.123456789012345", "2026-11-30 18:39:00",
    "1700000000123",
    "550e8400-e29b-41d4-a716-446655440000", "192.168.100.200", "v1.2.3456789012", "a@b", "x = y[1234567:8901234]",
    "ask_something_very_long_of_me", "4111 1111 1111 1112", "max_tokens=4096&n=1",
]  # fmt: skip
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n%b\r\n"


def post(body: bytes, headers: bytes = b"") -> bytes:
    return HEAD % (len(body), headers) + body


def scrub(raw: bytes) -> bytes:
    scrubbed, _ = SCRUBBER.request(raw)
    assert len(scrubbed) == len(raw)
    assert [byte in b"\r\n" for byte in scrubbed] == [byte in b"\r\n" for byte in raw]
    return scrubbed


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("text", ["%s", "my key: %s.", "a\n%s\nb", 'say "%s"!', "é %s é", "\\%s\\n"])
def test_what_has_a_form_is_filled(secret: str, text: str) -> None:
    """In JSON, in JSON within JSON, in a body that breaks off; JSON stays JSON and the rest of the text stays."""
    for dump in (json.dumps, lambda value: json.dumps({"arguments": json.dumps(value)}), orjson.dumps):
        whole = dump({"messages": [{"content": text % secret}], "n": 1})
        body = whole if isinstance(whole, bytes) else whole.encode()
        for sent in (body, body[:-3]):
            scrubbed = scrub(post(sent))
            assert secret.encode() not in scrubbed
        told = scrub(post(body)).partition(b"\r\n\r\n")[2]
        assert orjson.loads(told).keys() == orjson.loads(body).keys()
        assert json.dumps(orjson.loads(told)).count(r"\n") == json.dumps(orjson.loads(body)).count(r"\n")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_it_stays(text: str) -> None:
    """Prompts are the traffic: they are not changed without need."""
    raw = post(json.dumps({"content": f"see {text} there"}).encode())
    assert scrub(raw) == raw


def test_an_escaped_at_sign_is_one() -> None:
    """JSON may write it in two ways."""
    assert b"john" not in scrub(post(rb'{"a":"john\u0040mail.example.org"}'))
    assert orjson.loads(scrub(post(rb'{"a":"john\u0040mail.example.org"}')).partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize(
    "line",
    [
        b"Authorization: Bearer %b", b"authorization:%b", b"AUTHORIZATION : Bearer   %b", b"Authorization Bearer %b",
        b" Authorization: %b", b"Authorization: Bearer\r\n  %b", b"Proxy-Authorization: Basic %b", b"api-key: %b",
        b"X-API-Key: %b", b"Ocp-Apim-Subscription-Key: %b", b"Cookie: a=%b; b=c", b"X-Auth-Token: %b",
        b"x-amz-security-token: %b", b"X-Request-Info: key is sk-%b", b"Referer: http://h/?api_key=%b&x=1",
        b"\x00Authorization: Bearer %b", b"X-Csrf-Token: %b",
    ],
)  # fmt: skip
@pytest.mark.parametrize("ends", [b"\r\n", b"\n"])
def test_secret_headers_are_masked_however_broken(line: bytes, ends: bytes) -> None:
    """Whole heads and heads that break off; whatever else stands in them stays."""
    secret = b"topSecret0123456789abcdef"
    raw = post(b"{}", line.replace(b"\r\n", ends) % secret + ends)
    for sent in (raw, raw[: raw.find(secret) + len(secret)], raw.replace(b"\r\n", ends)):
        scrubbed = scrub(sent)
        assert secret not in scrubbed
        assert scrubbed[: raw.find(line[:4])] == sent[: raw.find(line[:4])]
    assert scrub(raw).endswith(b"{}")


def test_the_scheme_stays_and_the_counts_tell() -> None:
    """`Bearer` is no secret, and a reader wants to know what was found."""
    scrubbed, counts = SCRUBBER.request(post(b"{}", b"Authorization: Bearer abcdef\r\n"))
    assert b"Authorization: Bearer xxxxxx\r\n" in scrubbed
    assert counts == Counter({"headers": 1})
    assert not SCRUBBER.request(post(b"{}"))[1].total()


def test_a_secret_is_masked_wherever_it_stands() -> None:
    """In the query, in another header, in the body, also across the chunks of one."""
    key = b"local-test-token"
    raw = post(b'{"a":"it is local-test-token"}', b"X-Api-Key: %b\r\nX-Note: %b\r\n" % (key, key))
    raw = raw.replace(b"/completions ", b"/completions?k=%b " % key)
    scrubbed, counts = SCRUBBER.request(raw)
    assert key not in scrubbed
    assert (len(scrubbed), counts["repeated"]) == (len(raw), 3)
    chunked = (
        b"POST /x HTTP/1.1\r\nX-Api-Key: local-test-token\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'b\r\n{"a":"local\r\nb;x=1\r\n-test-token\r\n2\r\n"}\r\n0\r\nX-Api-Key: other-token\r\n\r\n'
    )
    said = scrub(chunked)
    assert said.endswith(b'b\r\n{"a":"xxxxx\r\nb;x=1\r\nxxxxxxxxxxx\r\n2\r\n"}\r\n0\r\nX-Api-Key: xxxxxxxxxxx\r\n\r\n')


@pytest.mark.parametrize(
    "tail",
    [
        b"zz\r\nhello", b"5\r\nhe", b"5\r\nhelloXX3\r\nabc\r\n", b"-1\r\n\r\n", b"ffffffffffffffff\r\nx", b"5\r\n", b"",
        b"0\r\n", b"4111111111111111\r\nabc",
    ],
)  # fmt: skip
def test_broken_chunks_stay_as_broken(tail: bytes) -> None:
    """A framing that makes no sense is the very thing that is to be replayed."""
    raw = b"POST /x HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n" + tail
    assert scrub(raw) == raw


def test_members_of_json() -> None:
    """Secret ones are filled, people get a name that is the same each time; numbers stay numbers."""
    body = (
        b'{"user":"jane","password" : "a\\"b","badge":"77","x":{"api_key":"k"},"user_id":4711,"phone":5,"role":"user",'
        b'"arguments":"{\\"password\\":\\"hunter2\\",\\"user\\":\\"jane\\"}"}'
    )
    scrubbed = orjson.loads(scrub(post(body)).partition(b"\r\n\r\n")[2])
    assert scrubbed["password"] == "xxxx"
    assert (scrubbed["badge"], scrubbed["x"]["api_key"], scrubbed["phone"], scrubbed["role"]) == ("xx", "x", 9, "user")
    assert scrubbed["user"] != "jane"
    assert len(scrubbed["user"]) == len("jane")
    assert 1000 <= scrubbed["user_id"] <= 9999 != 4711
    inner = orjson.loads(scrubbed["arguments"])
    assert (inner["password"], inner["user"]) == ("xxxxxxx", scrubbed["user"])
    assert b"hunter2" not in scrub(post(b'{"password":"hunter2'))
    assert b"hunter" not in scrub(post(b'{"password":"hunter\\'))


def test_people_sessions_and_addresses_get_names() -> None:
    """The same for the same, another for another, and nothing that could be looked up."""
    head = b"X-Chat: c1\r\nX-User-Id: jane\r\nX-Forwarded-For: 203.0.113.9, 2001:db8::1\r\nUser-Agent: me/1.0\r\n"
    said = scrub(post(b"{}", head))
    assert b"X-Forwarded-For: 111.1.111.1, 1111:111::1\r\nUser-Agent: me/1.0\r\n" in said
    assert b"jane" not in said
    assert said == scrub(post(b"{}", head))
    assert SCRUBBER.name(b"a") != SCRUBBER.name(b"b") != Scrubber(b"other").name(b"b")
    assert all(48 < digit <= 57 for digit in SCRUBBER.name(b"1234567890123456", 16))


@pytest.mark.parametrize(
    "url",
    [
        b"/x?api_key=topsecret99", b"/x?a=1&token=topsecret99&b=2", b"/x?sig=topsecret99",
        b"/x?X-Amz-Signature=topsecret99",
        b"/x?key=topsecret99#f", b"http://u:topsecret99@h/x", b"/x?client_secret=topsecret99",
        b"/sk-topsecret99topsecret99",
    ],
)  # fmt: skip
def test_urls_hold_secrets(url: bytes) -> None:
    """In the request line, in a form, and in a URL in a prompt, whichever way it is escaped."""
    raw = b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % url
    assert b"topsecret99" not in scrub(raw)
    assert scrub(raw).startswith(b"GET ")
    assert scrub(raw).endswith(b" HTTP/1.1\r\nHost: h\r\n\r\n")
    assert b"topsecret99" not in scrub(post(b'{"a":"see https://h%b now"}' % url))
    assert b"topsecret99" not in scrub(post(b'{"a":"see https://h%b now"}' % url.replace(b"&", rb"\u0026")))


def test_a_form_holds_secrets() -> None:
    """Its first field as well as the others."""
    assert scrub(post(b"password=hunter2&a=1&token=abc")).endswith(b"password=xxxxxxx&a=1&token=xxx")


def test_compressed_bodies_are_refused_only_when_they_hold_something() -> None:
    """They cannot be changed in place."""
    coded = b"Content-Encoding: gzip\r\n"
    clean = post(gzip.compress(b'{"a":"hello"}', mtime=0), coded)
    assert scrub(clean) == clean
    for body in (gzip.compress(b'{"a":"john@mail.example.org"}'), b"no gzip \xff"):
        with pytest.raises(Unscrubbable):
            SCRUBBER.request(post(body, coded))
    assert scrub(post(b'{"a":"john@mail.example.org"}', coded)).endswith(b'{"a":"xxxx@xxxx.xxxxxxx.xxx"}')


def test_what_is_beside_the_bytes_is_scrubbed_too() -> None:
    """The path from the request's own line, the session and the client by their names."""
    raw = b"GET /users/john@mail.example.org?x=1 HTTP/1.1\r\n\r\n"
    one = Recorded(0.0, 0, 0, "GET", "/users/john@mail.example.org", raw, Answered(), client="10.0.0.7", session="jane")
    scrubbed, _ = SCRUBBER.recorded(one)
    assert scrubbed.path == "/users/xxxx@xxxx.xxxxxxx.xxx"
    assert (len(scrubbed.client), len(scrubbed.session)) == (12, 12)
    assert SCRUBBER.recorded(replace(one, client="", session=""))[0].client == ""
    assert SCRUBBER.recorded(replace(one, raw=b""))[0].path == scrubbed.path


def test_base64_of_basic_credentials_goes_with_them() -> None:
    """What is in the header is masked as it stands."""
    coded = base64.b64encode(b"jane:hunter2")
    assert coded not in scrub(post(b"{}", b"Authorization: Basic " + coded + b"\r\n"))


PIECES = st.sampled_from([
    b"\r\n", b"\n", b" ", b": ", b'"', b"\\", b"Authorization: ", b"Transfer-Encoding: chunked", b"5\r\n",
    b"sk-abcdefghijkl1234",
    b" john@mail.example.org ", b'"user":"', b"+49 170 1234567", b"?token=", b"\\u00e9", b"{", b"}", b"\x00",
    b"\xff", b"=",
])  # fmt: skip


@given(st.lists(st.one_of(PIECES, st.binary(max_size=5)), max_size=30).map(b"".join))
def test_any_bytes_keep_their_length_and_their_lines(raw: bytes) -> None:
    """Whatever was sent, and a second time nothing is left to do to the text that has a form."""
    scrubbed = scrub(b"POST /v1/x HTTP/1.1\r\n" + raw)
    assert scrubbed.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert b"john@mail.example.org" not in scrubbed


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(SECRETS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["user", "password", "b\n"]), inner),
    max_leaves=12,
))  # fmt: skip
def test_any_json_stays_json(value: object) -> None:
    """With the same members in the same places."""
    body = json.dumps(value).encode()
    json.loads(scrub(post(body)).partition(b"\r\n\r\n")[2])
