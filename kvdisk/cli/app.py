"""The command group: a command is imported when it is run or listed, so that none pays for another's imports."""

import importlib

import click

# Name -> (module, its click command).
COMMANDS = {
    "bench": ("kvdisk.cli.bench", "bench"),
    "demo": ("kvdisk.cli.demo", "demo"),
    "inspect": ("kvdisk.cli.inspect", "inspect"),
}


class CommandTable(click.Group):
    """A group whose commands are those of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.command(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvdisk")
def app() -> None:
    """kvdisk keeps vLLM's KV cache on the host and on local NVMe."""
