"""${message}"""

from alembic import op
import sqlalchemy as sa

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = depends_on = None


def upgrade() -> None:
    """Bring the schema to this version."""
    ${upgrades if upgrades else "pass"}
