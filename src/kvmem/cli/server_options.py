"""The options of the HTTP side, as a dataclass like those of kvmem.cli.options."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvmem.cli.flags import flag, llama_flag
from kvmem.config import ServerConfig
from kvmem.errors import ConfigError

__all__ = ["ServerOptions"]

SERVER_PANEL = "Server"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where to listen, and for whom."""

    host: Annotated[
        str, llama_flag("--host", env="HOST", panel=SERVER_PANEL, help="Address to listen on.")
    ] = "127.0.0.1"
    port: Annotated[
        int,
        llama_flag("--port", env="PORT", panel=SERVER_PANEL, help="Port; 0 for any that is free."),
    ] = 8080
    alias: Annotated[
        str | None,
        llama_flag("-a", "--alias", env="ALIAS", panel=SERVER_PANEL,
               help="Name of the model in replies. Left out: the file's name."),
    ] = None  # fmt: skip
    api_key: Annotated[
        str | None,
        flag("--api-key", env="LLAMA_API_KEY", panel=SERVER_PANEL,
              help="Key that clients must bring, or several with commas between."),
    ] = None  # fmt: skip
    api_key_file: Annotated[
        Path | None,
        llama_flag("--api-key-file", env="API_KEY_FILE", panel=SERVER_PANEL,
               help="File with such keys, one a line; lines that begin with # are comments. "
               "They add to --api-key."),
    ] = None  # fmt: skip
    ssl_key_file: Annotated[
        Path | None,
        llama_flag("--ssl-key-file", env="SSL_KEY_FILE", panel=SERVER_PANEL,
               help="PEM file of the private key, for HTTPS."),
    ] = None  # fmt: skip
    ssl_cert_file: Annotated[
        Path | None,
        llama_flag("--ssl-cert-file", env="SSL_CERT_FILE", panel=SERVER_PANEL,
               help="PEM file of the certificate, for HTTPS."),
    ] = None  # fmt: skip
    cors_origins: Annotated[
        str,
        llama_flag("--cors-origins", env="CORS_ORIGINS", panel=SERVER_PANEL,
               help="Web pages that may ask, as https://host with commas between, or *. Left out, "
               "or localhost: those of this machine alone."),
    ] = ""  # fmt: skip
    allowed_hosts: Annotated[
        str,
        flag("--allowed-hosts", env="KVMEM_ALLOWED_HOSTS", panel=SERVER_PANEL,
             help="Names that requests may call this server by where no key is set, with commas "
             "between: chat.example, *.example for all below it, * for any. Addresses and names "
             "of this network always may."),
    ] = ""  # fmt: skip
    slots: Annotated[
        bool,
        llama_flag("--slots/--no-slots", env="ENDPOINT_SLOTS", panel=SERVER_PANEL,
               help="Show what runs and what is kept at /slots; never any text."),
    ] = True  # fmt: skip
    metrics: Annotated[
        bool,
        llama_flag("--metrics", env="ENDPOINT_METRICS", panel=SERVER_PANEL,
               help="Show counters for Prometheus at /metrics."),
    ] = False  # fmt: skip
    parallel: Annotated[
        int,
        llama_flag("-np", "--parallel", env="N_PARALLEL", panel=SERVER_PANEL,
               help="Requests at a time: 1; others wait."),
    ] = 1  # fmt: skip

    def config(self, model: Path) -> ServerConfig:
        """Raises ConfigError: a rule is broken."""
        if self.parallel != 1:
            raise ConfigError("parallel", self.parallel, "1: one history is on the device")
        origins = [text.strip().rstrip("/") for text in self.cors_origins.split(",")]
        hosts = [text.strip() for text in self.allowed_hosts.split(",")]
        return ServerConfig(
            host=self.host,
            port=self.port,
            alias=self.alias or model.stem,
            api_keys=self._keys(),
            allowed_hosts=tuple(name for name in hosts if name),
            cors_origins=tuple(origin for origin in origins if origin not in ("", "localhost")),
            ssl_key_file=self.ssl_key_file,
            ssl_cert_file=self.ssl_cert_file,
            show_slots=self.slots,
            show_metrics=self.metrics,
        )

    def _keys(self) -> tuple[str, ...]:
        given = self.api_key
        if given is None:  # a variable that is set and empty is no option to Typer, but was meant
            given = os.environ.get("LLAMA_API_KEY")
        keys = [] if given is None else [key.strip() for key in given.split(",")]
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text("utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                rule = f"a readable file ({error.__class__.__name__})"
                raise ConfigError("api_key_file", self.api_key_file, rule) from None
            found = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
            if not found:
                raise ConfigError("api_key_file", self.api_key_file, "a file with a key in it")
            keys += found
        return tuple(keys)
