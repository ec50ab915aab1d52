//! Why a target is unreachable.

use riopipe_nvme::command::Status;

use crate::initiator::association::{AskError, AssociationError};
use crate::initiator::known::Changed;
use crate::wire::status;

/// Why a target of an open volume is unreachable, or is lost to its owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnreachableCause {
    /// The association with it is lost, or could not be set up again.
    #[error(transparent)]
    Association(#[from] AssociationError),
    /// It came back, and its properties have changed (trap T27).
    #[error(transparent)]
    Changed(#[from] Changed),
    /// It came back, and the label of one of its drives could not be read.
    #[error("{}", status::text(*.0))]
    Label(Status),
    /// It came back, and refused the owner's claim of the volume.
    #[error("{}", status::text(*.0))]
    Claim(Status),
    /// It came back, and a command could not be sent to it.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// It released the volume, and was lost after that.
    #[error("the volume was released there")]
    Released,
}
