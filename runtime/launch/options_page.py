"""Prints docs/use/options.md, which is made from the declarations of the settings.

python -m pensieve.runtime.launch.options_page > docs/use/options.md
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from ...scheduler.declaration import User, flag
from .options import ALIASES, GROUPS, OPTIONS, PATH_HELP, Option

TOP = f"""\
# Options of `pensieve serve`

{fill(f"`pensieve serve PATH [options]`: PATH is {PATH_HELP}.", 100)}

`--help` shows the common options, `--help-all` all of them. `--config FILE` reads options from a
TOML file, under their names without the leading dashes; flags override it.
A wrong setting ends the start with an error that names the option (exit status 2). So does an
option without effect.

[`LLM`](offline.md) and [Triton's model](triton.md) take the options whose last column names them;
`LLM` takes them with underscores. SIZE is a number of bytes, or one with a unit: `40GiB`. TOKENS
may end with `k` (1,000) or `K` (1,024).
"""

BOTTOM = """\
## Names of other programs

`--max-model-len`, `--max-num-seqs`, `--max-num-batched-tokens`, `--gpu-memory-utilization`,
`--kv-cache-dtype`, `--enforce-eager`, `--served-model-name`, `--host`, `--port` and `--api-key`
have vLLM's names and meanings. Of the values of `--kv-cache-dtype` only `auto`, `fp8` and
`fp8_e4m3`, which is the same, are accepted. The TOML file has Pensieve's names only.

| also accepted | Pensieve's name |
|---|---|
{aliases}

`build_engine` also accepts TensorRT-LLM's `--checkpoint_dir`, `--output_dir` and `--tp_size`.

Frequent other options of vLLM and TensorRT-LLM, such as `--swap-space`, are errors that say what to
use instead.

Values for many chats on one GPU: [operations](operations.md#many-chats-on-one-gpu).
"""


def page() -> str:
    parts = [TOP]
    for group, about in {"": None, **GROUPS}.items():
        title = group or "general"
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        if about is not None:
            parts.append(f"{about}\n")
        rows = [row(one) for one in OPTIONS if one.declared.group == group and one.declared.help]
        parts.append("".join(["| option | default | meaning | also |\n|---|---|---|---|\n", *rows]))
    aliases = "\n".join(f"| `{theirs}` | `{ours}` |" for theirs, ours in ALIASES.items())
    parts.append(BOTTOM.format(aliases=aliases))
    return "\n".join(parts)


def row(option: Option) -> str:
    declared = option.declared
    more = f" ([more]({link(declared.page)}))" if declared.page else ""
    users = {User.OFFLINE: "`LLM`", User.TRITON: "Triton"}
    also = ", ".join(name for user, name in users.items() if user in declared.users)
    words = ", ".join(f"`{word}`" for word in spellings(option))
    return f"| {words} | {option.default_text} | {declared.help}{more} | {also} |\n"


def spellings(option: Option) -> Iterator[str]:
    """The option with its value, then the other choices."""
    name = flag(option.name)
    declared = option.declared
    if option.is_switch:
        yield name
        yield f"--no-{name.removeprefix('--')}"
    elif declared.choices:
        first, *others = declared.choices
        yield f"{name} {first}"
        yield from others
    else:
        yield f"{name} {option.unit}{' ...' if option.several else ''}"


def link(target: str) -> str:
    """The way from docs/use/ to a page."""
    return "../" + target.removeprefix("docs/")


if __name__ == "__main__":
    print(page(), end="")
