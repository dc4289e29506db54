"""The token guards what changes something, and everything where others can connect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aqueduck.config.server import ServerConfig
from aqueduck.model.errors import ConfigError, ServerStartError
from aqueduck.web.server import serve
from tests.web.conftest import TOKEN, Client
from tests.web.made_up import Stage

CHANGE = ("POST", "/api/v1/groups/shop/disable")


def test_without_a_token_nothing_can_be_changed(server_of: Callable[..., Client]) -> None:
    """A server without a token is for reading, even if a token is sent."""
    client = server_of()
    for token in (None, "", "anything"):
        answer = client.ask(*CHANGE, token=token)
        assert (answer.status, answer.error["code"]) == (403, "http.read_only")
    assert client.get("/api/v1/status").status == 200
    assert client.stage.calls == []


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"],
)
def test_a_change_needs_the_right_token(client: Client, header: str | None) -> None:
    """No token, another one, or another scheme is refused, and the answer does not repeat it."""
    answer = client.ask(*CHANGE, headers={} if header is None else {"Authorization": header})
    assert (answer.status, answer.error["code"]) == (401, "http.token")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert TOKEN.encode() not in answer.body
    assert client.stage.calls == []


def test_the_right_token_may_change(client: Client) -> None:
    """The scheme's name may be written in any case."""
    assert client.ask(*CHANGE, headers={"Authorization": f"bearer {TOKEN}"}).status == 202


def test_on_loopback_reading_needs_no_token_but_no_wrong_one_either(client: Client) -> None:
    """A token that is sent must be right, so the page can check what was typed."""
    assert client.get("/api/v1/status").status == 200
    assert client.get("/api/v1/status", token=TOKEN).status == 200
    assert client.get("/api/v1/status", token="wrong").status == 401


def test_elsewhere_everything_needs_the_token(server_of: Callable[..., Client]) -> None:
    """Bound to all addresses, only the page's own files and the colour of the probes are free."""
    client = server_of(host="0.0.0.0", token_env="TOKEN")
    for path in ("/api/v1/status", "/api/v1/events", "/api/v1/openapi.json", "/metrics", "/api/v1/tables"):
        assert client.get(path).status == 401, path
    assert client.get("/metrics", token=TOKEN).status == 200
    assert client.get("/healthz").status == 200
    assert client.get("/").status == 200
    assert client.get("/readyz").json == {"ready": True, "stalled": [], "errored": []}
    assert client.get("/readyz", token=TOKEN).json["errored"] == ["public.prices", "bolt"]


def test_a_foreign_name_that_points_here_is_refused(client: Client) -> None:
    """A web page elsewhere cannot read along by giving its own name our address."""
    assert client.get("/api/v1/status", headers={"Host": "evil.example:8642"}).status == 400
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert client.get("/api/v1/status", headers={"Host": host}).status == 200, host


def test_a_token_must_be_there_and_long_enough() -> None:
    """A missing or short token stops the start, with the command that makes a good one."""
    for env in ({}, {"TOKEN": "short"}, {"TOKEN": "with a space in the middle"}):
        with (
            pytest.raises(ConfigError, match="TOKEN") as caught,
            serve(ServerConfig(port=0, token_env="TOKEN"), Stage(), Stage(), env=env),
        ):
            pass
        assert "openssl" in str(caught.value)


def test_a_port_that_is_taken_is_a_clear_error(client: Client) -> None:
    """The error names the port and the setting."""
    port = int(client.address.rstrip("/").rpartition(":")[2])
    with (
        pytest.raises(ServerStartError, match=f"port {port}") as caught,
        serve(ServerConfig(port=port), Stage(), Stage()),
    ):
        pass
    assert "server.port" in str(caught.value)


def test_a_host_that_is_not_ours_is_a_clear_error() -> None:
    """An address of another machine cannot be listened on."""
    config = ServerConfig(host="192.0.2.1", port=0, token_env="TOKEN")
    with (
        pytest.raises(ServerStartError, match=r"192\.0\.2\.1"),
        serve(config, Stage(), Stage(), env={"TOKEN": TOKEN}),
    ):
        pass


def test_a_disabled_server_does_not_listen() -> None:
    """`server.enabled: false` gives no address."""
    with serve(ServerConfig(enabled=False), Stage(), Stage()) as address:
        assert address is None


def test_tls_is_spoken_with_a_certificate(server_of: Callable[..., Client], tmp_path: Path) -> None:
    """With `tls_cert` and `tls_key` the server answers over HTTPS."""
    cert, key = certificate(tmp_path)
    client = server_of(tls_cert=str(cert), tls_key=str(key))
    assert client.address.startswith("https://")
    assert client.get("/healthz").status == 200


def test_a_certificate_that_cannot_be_read_is_a_clear_error(tmp_path: Path) -> None:
    """Before anything listens, the error names the settings."""
    (tmp_path / "broken.pem").write_text("nothing")
    for name in ("broken.pem", "missing.pem"):
        file = str(tmp_path / name)
        with (
            pytest.raises(ServerStartError, match="certificate") as caught,
            serve(ServerConfig(port=0, tls_cert=file, tls_key=file), Stage(), Stage()),
        ):
            pass
        assert "server.tls_cert" in str(caught.value)


def certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate for localhost that no client trusts."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_file, key_file
