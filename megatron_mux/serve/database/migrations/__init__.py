"""The database's schema and its changes, by Alembic: `versions/` has a file for each change."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from megatron_mux.errors import UserError


def upgrade(engine: Engine) -> None:
    """Bring a database to this version's schema.

    Raises:
        UserError: It cannot be opened, or a newer version of megatron-mux has changed it.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent))
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    try:
        with engine.begin() as connection:
            now = MigrationContext.configure(connection).get_current_revision()
            if now is not None and now not in known:
                raise UserError(
                    f"the database {engine.url.render_as_string()} was made by a newer version of megatron-mux "
                    f"(schema {now}): install that version, or restore a backup"
                )
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except SQLAlchemyError as error:
        raise UserError(f"the database {engine.url.render_as_string()} cannot be used: {error}") from error
