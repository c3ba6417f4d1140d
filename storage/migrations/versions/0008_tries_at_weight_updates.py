"""tries at weight updates, checksums of a load, and when a turn was asked for"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    op.create_table(
        'weighttry',
        sa.Column('id', TEXT, nullable=False),
        sa.Column('run', TEXT, nullable=False),
        sa.Column('version', sa.Integer(), nullable=False),
        sa.Column('engine', TEXT, nullable=False),
        sa.Column('part', TEXT, nullable=False),
        sa.Column('began_at', sa.Float(), nullable=False),
        sa.Column('ended_at', sa.Float(), nullable=True),
        sa.Column('ended', TEXT, nullable=False),
        sa.Column('why', TEXT, nullable=False),
        sa.PrimaryKeyConstraint('id'),
    )
    with op.batch_alter_table('weighttry') as batch_op:
        batch_op.create_index(batch_op.f('ix_weighttry_run'), ['run'], unique=False)
    with op.batch_alter_table('engineload') as batch_op:
        batch_op.add_column(sa.Column('checked', sa.Integer(), nullable=False, server_default='0'))
    with op.batch_alter_table('turn') as batch_op:
        batch_op.add_column(sa.Column('asked_at', sa.Float(), nullable=False, server_default='0'))


def downgrade() -> None:
    with op.batch_alter_table('turn') as batch_op:
        batch_op.drop_column('asked_at')
    with op.batch_alter_table('engineload') as batch_op:
        batch_op.drop_column('checked')
    op.drop_table('weighttry')
