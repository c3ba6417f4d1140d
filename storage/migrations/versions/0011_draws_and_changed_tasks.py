"""what a run drew, which tasks were added to it or retired, and how many it began with"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    op.create_table(
        'draw',
        sa.Column('run', TEXT, nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('task', TEXT, nullable=False),
        sa.Column('difficulty', TEXT, nullable=False),
        sa.Column('policy_version', sa.Integer(), nullable=False),
        sa.Column('drawn_at', sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(['run'], ['run.id']),
        sa.PrimaryKeyConstraint('run', 'number'),
    )
    op.create_table(
        'changedtask',
        sa.Column('run', TEXT, nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('task', TEXT, nullable=False),
        sa.Column('position', sa.Integer(), nullable=False),
        sa.Column('change', TEXT, nullable=False),
        sa.Column('why', TEXT, nullable=False),
        sa.Column('policy_version', sa.Integer(), nullable=False),
        sa.Column('at', sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(['run'], ['run.id']),
        sa.PrimaryKeyConstraint('run', 'number', 'task'),
    )
    with op.batch_alter_table('group') as batch_op:
        batch_op.add_column(sa.Column('draw', sa.Integer(), nullable=True))
    with op.batch_alter_table('run') as batch_op:
        batch_op.add_column(sa.Column('train_tasks', sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table('run') as batch_op:
        batch_op.drop_column('train_tasks')
    with op.batch_alter_table('group') as batch_op:
        batch_op.drop_column('draw')
    op.drop_table('changedtask')
    op.drop_table('draw')
