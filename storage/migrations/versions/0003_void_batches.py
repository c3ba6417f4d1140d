"""void batches: a step has one batch that trains it, and any number that taught nothing"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()
NOT_VOID = sa.text("state != 'void'")


def upgrade() -> None:
    op.drop_index('batch_run_step', table_name='batch')
    with op.batch_alter_table('batch') as batch_op:
        batch_op.add_column(sa.Column('reason', TEXT, nullable=False, server_default=''))
    op.create_index(
        'batch_run_step', 'batch', ['run', 'step'], unique=True, sqlite_where=NOT_VOID, postgresql_where=NOT_VOID
    )


def downgrade() -> None:
    op.drop_index('batch_run_step', table_name='batch')
    with op.batch_alter_table('batch') as batch_op:
        batch_op.drop_column('reason')
    op.create_index('batch_run_step', 'batch', ['run', 'step'], unique=True)
