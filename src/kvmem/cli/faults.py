"""One line for each thing that stops a command: `error: what; try what`."""

import os
import re
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

from kvmem.errors import CapacityError, ConfigError, DownloadError, KvmemError, ModelError

__all__ = [
    "LATER",
    "OTHER_VARIABLES",
    "RENAMED",
    "describe",
    "flag_of",
    "in_flags",
    "unknown_flag",
    "unknown_variable",
]

FAILED = 1
USAGE = 2

# setting -> the flag that a person typed
FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "model": "-m",
        "n_gpu_layers": "-ngl",
        "n_threads": "-t",
        "n_threads_batch": "-tb",
        "workspace_tokens": "-c",
        "budget_tokens": "--kvmem-budget",
        "reserve_tokens": "--kvmem-gen-reserve",
        "block_tokens": "--kvmem-block-tokens",
        "sink_tokens": "--kvmem-sink-tokens",
        "recent_tokens": "--kvmem-recent-tokens",
        "host_limit_bytes": "--kvmem-host-gb",
        "conversations": "--kvmem-conversations",
        "conversations_bytes": "--kvmem-conversations-gb",
        "device_checkpoint": "--kvmem-device-checkpoint",
        "scorer": "--kvmem-scorer",
        "calibration": "--kvmem-calibration",
        "query_replay": "--kvmem-query-replay",
        "query_policy": "--kvmem-query-policy",
        "type_k": "-ctk",
        "type_v": "-ctv",
        "batch_tokens": "-b",
        "ubatch_tokens": "-ub",
        "flash_attn": "-fa",
        "spec_type": "--spec-type",
        "spec_draft_n_max": "--spec-draft-n-max",
        "spec_draft_type_k": "-ctkd",
        "spec_draft_type_v": "-ctvd",
        "mtp_state": "--kvmem-mtp-state",
        "api_keys": "--api-key",
        "ssl_key_file": "--ssl-key-file",
        "ssl_cert_file": "--ssl-cert-file",
        "n_predict": "-n",
        "n_prompts": "--prompts",
        "n_tokens": "--tokens",
        "n_turns": "--turns",
        "first_seed": "--seed",
        "folder": "the folder",
        "kept_run": "the file of a kept run",
        "temperature": "--temp",
    }
)

# setting -> what to try; `{flag}` is its flag
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "model": "-m FILE, or kvmem demo-model for a small one",
        "kvmem": "it without that, or without --no-kvmem",
        "budget_tokens": "another --kvmem-budget (kvmem plan shows what fits)",
        "reserve_tokens": "another --kvmem-gen-reserve, or leave it out",
        "sink_tokens": "a smaller --kvmem-sink-tokens, or a larger --kvmem-budget",
        "recent_tokens": "a smaller --kvmem-recent-tokens, or a larger --kvmem-budget",
        "host_limit_bytes": "a smaller --kvmem-host-gb, or leave it out",
        "conversations_bytes": "a smaller --kvmem-conversations-gb, or leave it out",
        "type_k": "--kv-dtype f16, which sets both",
        "type_v": "--kv-dtype, which sets both",
        "spec_type": "--spec-type none",
        "spec_draft_type_k": "--spec-kv-dtype f16, which sets both",
        "spec_draft_type_v": "--spec-kv-dtype, which sets both",
        "ubatch_tokens": "a larger -ub, or leave it out",
        "port": "another --port, or 0 for any that is free",
    }
)

# flag -> the feature that it belongs to, which is not built yet
LATER: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("--mmproj", "--mmproj-offload", "--no-mmproj-offload", "--image-min-tokens",
             "--image-max-tokens", "-mmdev", "--video-fps"),
            "reading images",
        ),
        **dict.fromkeys(
            ("--spec-draft-p-split", "--draft-p-split", "--spec-draft-sampling",
             "--spec-draft-backend-sampling", "--no-spec-draft-backend-sampling",
             "--spec-synth-len", "--spec-synth-rates", "--spec-ngram-mod-n-min",
             "--spec-ngram-mod-n-max", "--spec-ngram-mod-n-match", "--spec-ngram-simple-size-n",
             "--spec-ngram-simple-size-m", "--spec-ngram-simple-min-hits",
             "--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m",
             "--spec-ngram-map-k-min-hits", "--spec-ngram-map-k4v-size-n",
             "--spec-ngram-map-k4v-size-m", "--spec-ngram-map-k4v-min-hits"),
            "that way of drafting tokens",
        ),
        **dict.fromkeys(
            ("-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft",
             "--spec-draft-hf", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
             "--spec-draft-ngl", "-devd", "--device-draft", "--spec-draft-device", "-otd",
             "--override-tensor-draft", "--spec-draft-override-tensor", "-cmoed",
             "--cpu-moe-draft", "--spec-draft-cpu-moe", "-ncmoed", "--n-cpu-moe-draft",
             "--spec-draft-ncmoe", "--spec-draft-n-cpu-moe", "-td", "--threads-draft",
             "--spec-draft-threads", "-tbd", "--threads-batch-draft",
             "--spec-draft-threads-batch"),
            "a draft model of its own",
        ),
        **dict.fromkeys(
            ("--kvmem-method", "--kvmem-query-last", "--kvmem-query-max-tokens",
             "--kvmem-gpu-ratio"),
            "that way of sizing a question or the pool",
        ),
        **dict.fromkeys(("--ui-dir", "--no-ui", "--webui"), "the chat page"),
        "--props": "changing settings while it runs",
        "--reasoning-format": "another way of showing thinking",
        **dict.fromkeys(
            ("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu", "-dev",
             "--device", "-ot", "--override-tensor", "--lora", "--list-devices"),
            "that way of loading a model",
        ),
        **dict.fromkeys(
            ("--kvmem-session-nvme-gb", "--kvmem-session-cache-dir", "--kvmem-host-mib",
             "--kvmem-disk-path", "--kvmem-disk-mib", "--kvmem-cpu-gb", "--kvmem-nvme-gb",
             "--kvmem-nvme-dir"),
            "keeping conversations on disk",
        ),
        **dict.fromkeys(("--anthropic",), "the messages API"),
        **dict.fromkeys(
            ("--cors-methods", "--cors-headers", "--cors-credentials"), "that security setting"
        ),
        **dict.fromkeys(("--kvmem-trace", "-lv", "--log-verbosity"), "that log"),
    }
)  # fmt: skip

# what llama-server once called a flag -> what it is called now
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("--draft", "--draft-n", "--draft-max"), "--spec-draft-n-max"),
        **dict.fromkeys(("--draft-min", "--draft-n-min"), "--spec-draft-n-min"),
    }
)

HELP = ("-h", "--help")
NEGATIVE = re.compile(r"-\d.*")
VARIABLE = re.compile(r"LLAMA_ARG_\w+|LLAMA_API_KEY\w*|KVMEM_\w+")

# of the build, the tests and the demo, not of a command
OTHER_VARIABLES = frozenset(
    {
        "KVMEM_CHECKS", "KVMEM_COMMIT", "KVMEM_CUDA", "KVMEM_DEMO_MODEL", "KVMEM_DIST",
        "KVMEM_LLAMA", "KVMEM_LLAMA_SOURCE", "KVMEM_RELEASE", "KVMEM_SANITIZE", "KVMEM_TEST_BODIES",
        "KVMEM_TEST_NEEDS_MODEL",
    }
)  # fmt: skip


def flag_of(setting: str) -> str:
    """The flag of a setting, as a person types it."""
    return FLAGS.get(setting, "--" + setting.replace("_", "-"))


def in_flags(rule: str) -> str:
    """A rule with `setting=value` written as the flag and its value."""
    for setting in sorted(FLAGS, key=len, reverse=True):
        rule = re.sub(rf"\b{setting}=", f"{FLAGS[setting]} ", rule)
    return rule


def describe(error: Exception, *, command: str) -> tuple[str, int]:
    """The line for an error, and the exit code."""
    if isinstance(error, ConfigError):
        hint = HINTS.get(error.setting, f"kvmem {command} --help")
        value = error.value
        if error.setting.endswith("_bytes") and isinstance(value, int):
            value = f"{value / (1 << 30):.4g} GiB"
        what = f"{flag_of(error.setting)} is {value}, but must be {in_flags(error.rule)}"
        return f"error: {what}; try {hint}", USAGE
    if isinstance(error, DownloadError):
        return f"error: {error}", FAILED
    if isinstance(error, ModelError):
        hint = "" if "; try " in str(error) else "; try another file"
        return f"error: {error}{hint}", FAILED
    if isinstance(error, CapacityError):
        hint = "" if "; try " in str(error) else "; try kvmem plan to see what fits"
        return f"error: {in_flags(str(error))}{hint}", FAILED
    if isinstance(error, KvmemError):
        return f"error: {error}; try kvmem {command} --help", FAILED
    return f"error: {type(error).__name__}: {error}; try again with --verbose", FAILED


def unknown_flag(
    args: Sequence[str], *, command: str, known: Set[str], with_value: Set[str]
) -> str | None:
    """The line for the first flag that there is not, or not yet; None where all are known.

    The parser would take -ts for -t with the value s. with_value: flags whose next argument is
    their value, whatever it looks like.
    """
    rest = iter(args)
    for arg in rest:
        flag = arg.partition("=")[0]
        if arg == "--":
            break
        if arg in with_value:
            next(rest, None)
        elif NEGATIVE.fullmatch(arg) or not arg.startswith("-") or arg == "-" or flag in known:
            continue
        elif flag in LATER:
            return f"error: {flag} is not there yet ({LATER[flag]} comes later); try without it"
        elif flag in RENAMED:
            return f"error: there is no option {flag} any more; try {RENAMED[flag]}"
        elif flag not in HELP:
            return f"error: there is no option {flag}; try kvmem {command} --help"
    return None


def unknown_variable(known: frozenset[str]) -> str | None:
    """The line for a set variable of ours or llama-server's that no option reads, or None."""
    for name in sorted(os.environ):
        if VARIABLE.fullmatch(name) and name not in known | OTHER_VARIABLES:
            return f"error: the variable {name} is set, but no option reads it; try unset {name}"
    return None
