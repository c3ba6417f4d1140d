"""evidence, replays and quarantine"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    op.create_table(
        'quarantine',
        sa.Column('run', TEXT, nullable=False),
        sa.Column('task', TEXT, nullable=False),
        sa.Column('why', TEXT, nullable=False),
        sa.Column('since', sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(['run'], ['run.id']),
        sa.PrimaryKeyConstraint('run', 'task'),
    )
    with op.batch_alter_table('episode') as batch_op:
        batch_op.add_column(sa.Column('evidence', sa.JSON(), nullable=False, server_default='{}'))
        batch_op.add_column(sa.Column('replays', sa.Integer(), nullable=False, server_default='0'))
    with op.batch_alter_table('group') as batch_op:
        batch_op.add_column(sa.Column('short', sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table('turn') as batch_op:
        batch_op.add_column(sa.Column('output_digest', TEXT, nullable=False, server_default=''))


def downgrade() -> None:
    with op.batch_alter_table('turn') as batch_op:
        batch_op.drop_column('output_digest')
    with op.batch_alter_table('group') as batch_op:
        batch_op.drop_column('short')
    with op.batch_alter_table('episode') as batch_op:
        batch_op.drop_column('replays')
        batch_op.drop_column('evidence')
    op.drop_table('quarantine')
