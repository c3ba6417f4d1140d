"""the namespace of a run: who may say that its workflow is gone"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    with op.batch_alter_table('run') as batch_op:
        batch_op.add_column(sa.Column('temporal_namespace', TEXT, nullable=False, server_default=''))


def downgrade() -> None:
    with op.batch_alter_table('run') as batch_op:
        batch_op.drop_column('temporal_namespace')
