"""
TLS in front of a PostgreSQL server that has none.

The embedded server is built without TLS.  The proxy answers libpq's SSLRequest, speaks real TLS
to the client with a certificate made on the spot, and plain PostgreSQL to the server.
"""

from __future__ import annotations

import datetime
import ipaddress
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@dataclass(frozen=True)
class Certificates:
    """Files of an authority, and of a server's certificate that it signed."""

    authority: Path
    server: Path


def make_certificates(folder: Path, host: str) -> Certificates:
    """An authority of its own, and a certificate for one host name or address."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name(f"authority {x509.random_serial_number()}")
    authority = _certificate(authority_name, authority_name, authority_key.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    server = _certificate(_name(host), authority_name, key.public_key()).add_extension(
        x509.SubjectAlternativeName([_alternative_name(host)]), critical=False
    )
    files = Certificates(folder / "authority.pem", folder / "server.pem")
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files.authority.write_bytes(authority.sign(authority_key, hashes.SHA256()).public_bytes(pem))
    files.server.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
        + server.sign(authority_key, hashes.SHA256()).public_bytes(pem)
    )
    return files


@contextmanager
def tls_proxy(port: int, certificate: Path) -> Iterator[int]:
    """Speak TLS on a port of its own for the server at `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=_serve, args=(client, port, context), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _serve(client: socket.socket, port: int, context: ssl.SSLContext) -> None:
    with suppress(OSError), client:
        if client.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
            return
        client.sendall(b"S")
        with (
            context.wrap_socket(client, server_side=True) as secure,
            socket.create_connection(("127.0.0.1", port)) as server,
        ):
            _pump(secure, server)


def _pump(secure: ssl.SSLSocket, server: socket.socket) -> None:
    while True:
        ready = [secure] if secure.pending() else select.select([secure, server], [], [])[0]
        for source in ready:
            data = source.recv(65536)
            if not data:
                return
            (server if source is secure else secure).sendall(data)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
    )
