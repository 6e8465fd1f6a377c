"""`ottava.amp.GradScaler` is `ottava.GradScaler`, where code written for other libraries looks."""

from .optim.loss_scaler import GradScaler

__all__ = ["GradScaler"]
