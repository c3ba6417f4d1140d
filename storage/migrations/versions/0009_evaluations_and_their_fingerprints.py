"""evaluations with their serving fingerprint, and how engines were last seen to serve"""

import sqlalchemy as sa
import sqlmodel
from alembic import op


revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None

TEXT = sqlmodel.sql.sqltypes.AutoString()


def upgrade() -> None:
    op.create_table(
        'servedevaluation',
        sa.Column('id', TEXT, nullable=False),
        sa.Column('run', TEXT, nullable=False),
        sa.Column('version', sa.Integer(), nullable=False),
        sa.Column('workflow', TEXT, nullable=False),
        sa.Column('execution', TEXT, nullable=False),
        sa.Column('temporal_namespace', TEXT, nullable=False),
        sa.Column('in_run', sa.Boolean(), nullable=False),
        sa.Column('state', TEXT, nullable=False),
        sa.Column('reason', TEXT, nullable=False),
        sa.Column('request', sa.JSON(), nullable=False),
        sa.Column('model', TEXT, nullable=False),
        sa.Column('taskset', TEXT, nullable=False),
        sa.Column('tasks', sa.Integer(), nullable=False),
        sa.Column('samples_per_task', sa.Integer(), nullable=False),
        sa.Column('seed', sa.Integer(), nullable=False),
        sa.Column('manifest', TEXT, nullable=False),
        sa.Column('fields', sa.JSON(), nullable=False),
        sa.Column('fingerprint', TEXT, nullable=False),
        sa.Column('settings', TEXT, nullable=False),
        sa.Column('engines', sa.JSON(), nullable=False),
        sa.Column('left_out', sa.JSON(), nullable=False),
        sa.Column('scores', sa.JSON(), nullable=False),
        sa.Column('excluded', sa.Integer(), nullable=False),
        sa.Column('redone', sa.Integer(), nullable=False),
        sa.Column('started_at', sa.Float(), nullable=False),
        sa.Column('ended_at', sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(['run'], ['run.id']),
        sa.PrimaryKeyConstraint('id'),
    )
    with op.batch_alter_table('servedevaluation') as batch_op:
        batch_op.create_index(batch_op.f('ix_servedevaluation_run'), ['run'], unique=False)
        batch_op.create_index(batch_op.f('ix_servedevaluation_workflow'), ['workflow'], unique=False)
    op.create_table(
        'serving',
        sa.Column('run', TEXT, nullable=False),
        sa.Column('engine', TEXT, nullable=False),
        sa.Column('version', sa.Integer(), nullable=False),
        sa.Column('facts', sa.JSON(), nullable=False),
        sa.Column('seen_at', sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint('run', 'engine'),
    )


def downgrade() -> None:
    op.drop_table('serving')
    op.drop_table('servedevaluation')
