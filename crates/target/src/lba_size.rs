//! Which drives may be served with logical blocks of 512 bytes: those that only plain hosts use.

use riopipe_media::Drive;
use riopipe_order::attribute::VolumeId;
use riopipe_order::write_order::DriveOrder;

use crate::checked_config::CheckedNamespace;

/// The reason why a drive is not served with logical blocks of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LbaSizeError {
    /// The drive is a member of a volume, by its label.
    #[error(
        "lba_size = 512: the drive is a member of volume {0}, and volumes have blocks of 4096 bytes: \
         leave lba_size out, or delete the volume first"
    )]
    Member(VolumeId),
    /// The drive keeps an order itself.
    #[error(
        "lba_size = 512: the drive keeps an order of its writes, which have blocks of 4096 bytes: \
         leave lba_size or the drive's order out"
    )]
    Order,
}

/// Checks that the drive can have logical blocks of the size that the configuration wants. `member_of`
/// is the volume that the drive's label names.
pub(crate) fn check_lba_size(
    namespace: &CheckedNamespace,
    drive: &dyn Drive,
    member_of: Option<VolumeId>,
) -> Result<(), LbaSizeError> {
    match member_of {
        _ if !namespace.lba_size.is_small() => Ok(()),
        Some(volume) => Err(LbaSizeError::Member(volume)),
        None if drive.order() != DriveOrder::None => Err(LbaSizeError::Order),
        None => Ok(()),
    }
}
