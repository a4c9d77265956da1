"""The settings of the HTTP side; kvmem.config has the others, and gives this one too."""

import re
from dataclasses import dataclass
from pathlib import Path

from kvmem.errors import ConfigError

__all__ = ["ServerConfig"]

HOST = re.compile(r"\*|(\*\.)?[^\s:/*]+")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^/\s\[\]*@:]+)(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side.

    alias: the name in /v1/models and in replies; None for the file's stem.
    api_keys: any of them opens every route but /health; empty for no check.
    queue_limit: requests that may wait; more are told to come back.
    allowed_hosts: names that requests may call this server by, where no key is set; "*" for any.
    cors_origins: web pages that may ask beside those of this machine; "*" for all.
    ssl_key_file, ssl_cert_file: PEM files, both or none.
    show_slots, show_metrics: whether /slots and /metrics answer.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None
    api_keys: tuple[str, ...] = ()
    queue_limit: int = 64
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    show_slots: bool = True
    show_metrics: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", self.port, "from 0 to 65535")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_keys", "an empty key", "a text that is not empty")
        if self.queue_limit < 1:
            raise ConfigError("queue_limit", self.queue_limit, "at least 1")
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            missing = "ssl_key_file" if self.ssl_key_file is None else "ssl_cert_file"
            raise ConfigError(missing, "not given", "given with the other half of the pair")
        for name in ("ssl_key_file", "ssl_cert_file"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ConfigError(name, path, "a file that can be read")
        for host in self.allowed_hosts:
            if not HOST.fullmatch(host):
                raise ConfigError("allowed_hosts", host, "*, a name, or a name as *.example.com")
        for origin in self.cors_origins:
            if origin != "*" and (not ORIGIN.fullmatch(origin)):
                raise ConfigError("cors_origins", origin, "* or as https://host or http://host:80")
