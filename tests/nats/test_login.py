"""Every way to log in, on servers that demand it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import ssl
import time
from pathlib import Path
from typing import Any

import nkeys
import pytest
import trustme

from settled.transports.base import Outgoing
from settled.transports.nats import Login, NatsTransport
from tests.nats.servers import Server, server

_PREFIXES = {"operator": 14 << 3, "account": 0, "user": 20 << 3}


def new_key(kind: str) -> nkeys.KeyPair:
    """A fresh key pair; its seed is two prefix bytes, 32 random ones and a checksum, in base 32."""
    prefix = _PREFIXES[kind]
    raw = bytes([18 << 3 | prefix >> 5, (prefix & 31) << 3]) + os.urandom(32)
    raw += nkeys.crc16(bytearray(raw)).to_bytes(2, "little")
    return nkeys.from_seed(bytearray(base64.b32encode(raw).rstrip(b"=")))


def public(key: nkeys.KeyPair) -> str:
    return bytes(key.public_key).decode()


def jwt(subject: str, name: str, signer: nkeys.KeyPair, claims: dict[str, Any]) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    body: dict[str, Any] = {
        "iat": int(time.time()),
        "iss": public(signer),
        "name": name,
        "sub": subject,
        "nats": {"version": 2, **claims},
    }
    digest = hashlib.new("sha512_256", json.dumps(body).encode()).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    text = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{text}.{base64.urlsafe_b64encode(signer.sign(text.encode())).decode().rstrip('=')}"


async def can_publish(transport: NatsTransport) -> bool:
    await transport.open()
    try:
        await transport.connection.jetstream.add_stream(name="S", subjects=["s"])
        return (await transport.publish(Outgoing(subject="s", data=b"x"))).sequence == 1
    finally:
        await transport.close()


def check(url: str, login: Login | None = None) -> None:
    assert asyncio.run(can_publish(NatsTransport(url, login=login)))


def refused(url: str, login: Login | None = None) -> None:
    with pytest.raises(ConnectionError, match=r"cannot connect to 127\.0\.0\.1"):
        asyncio.run(NatsTransport(url, login=login).open())


def with_user(one: Server, user: str) -> str:
    return one.url.replace("//", f"//{user}@")


def test_a_user_and_password_in_the_url_or_beside_it() -> None:
    with server("authorization { user: ann, password: secret }") as one:
        refused(one.url)
        refused(with_user(one, "ann:wrong"))
        check(with_user(one, "ann:secret"))
    with server("authorization { user: ann, password: secret }") as one:
        check(one.url, Login(user="ann", password="secret"))


def test_a_token_in_the_url_or_beside_it() -> None:
    with server("authorization { token: s3cr3t }") as one:
        refused(with_user(one, "wrong"))
        check(with_user(one, "s3cr3t"))
    with server("authorization { token: s3cr3t }") as one:
        check(one.url, Login(token="s3cr3t"))


def test_an_nkey(tmp_path: Path) -> None:
    key, seed = new_key("user"), tmp_path / "user.nk"
    seed.write_bytes(bytes(key.seed))
    with server(f"authorization {{ users: [ {{ nkey: {public(key)} }} ] }}") as one:
        refused(one.url)
        check(f"{one.url}?nkey={seed}")
    with server(f"authorization {{ users: [ {{ nkey: {public(key)} }} ] }}") as one:
        check(one.url, Login(nkey=seed))


def test_a_credentials_file(tmp_path: Path) -> None:
    operator, account, user = new_key("operator"), new_key("account"), new_key("user")
    operator_jwt = jwt(public(operator), "op", operator, {"type": "operator"})
    limits = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "leaf": -1, "imports": -1, "exports": -1}
    stored = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1, "wildcards": True}
    account_jwt = jwt(public(account), "acc", operator, {"type": "account", "limits": {**limits, **stored}})
    user_jwt = jwt(
        public(user),
        "ann",
        account,
        {"type": "user", "pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1},
    )
    creds = tmp_path / "ann.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{bytes(user.seed).decode()}\n------END USER NKEY SEED------\n"
    )
    system = new_key("account")
    system_jwt = jwt(public(system), "sys", operator, {"type": "account", "limits": limits})
    config = (
        f"operator: {operator_jwt}\nresolver: MEMORY\nsystem_account: {public(system)}\n"
        f"resolver_preload: {{ {public(account)}: {account_jwt}, {public(system)}: {system_jwt} }}\n"
    )
    with server(config) as one:
        refused(one.url)
        check(f"{one.url}?credentials={creds}")


def test_tls_with_a_client_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, cert in {
        "server": authority.issue_cert("127.0.0.1"),
        "client": authority.issue_cert("ann@example.org"),
    }.items():
        cert.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        (tmp_path / f"{name}.pem").write_bytes(b"".join(c.bytes() for c in cert.cert_chain_pems))
    config = (
        f"tls {{ cert_file: '{tmp_path}/server.pem', key_file: '{tmp_path}/server.key', "
        f"ca_file: '{tmp_path}/ca.pem', verify: true }}"
    )
    with server(config) as one:
        refused(f"{one.url}?tls_ca={tmp_path}/ca.pem")
        check(
            f"{one.url}?tls_ca={tmp_path}/ca.pem&tls_cert={tmp_path}/client.pem&tls_key={tmp_path}/client.key"
        )
    with server(config) as one:
        context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        context.load_cert_chain(tmp_path / "client.pem", tmp_path / "client.key")
        check(one.url.replace("nats:", "tls:"), Login(tls=context))
