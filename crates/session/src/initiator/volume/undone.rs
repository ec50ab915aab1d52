//! The decisions about undone blocks that were saved and are to be written back.

use riopipe_order::attribute::VolumeId;

/// The content of a volume block, compared with the one that was saved before it was undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockNow {
    /// It reads as zeroes, as the undo has left it (trap T10).
    Undone,
    /// It has the saved content.
    Restored,
    /// It has other content: it was written since.
    Changed,
}

impl BlockNow {
    /// Compares the present content of a block with the saved one.
    #[must_use]
    pub fn of(now: &[u8], saved: &[u8]) -> Self {
        if now == saved {
            Self::Restored
        } else if now.iter().all(|byte| *byte == 0) {
            Self::Undone
        } else {
            Self::Changed
        }
    }
}

/// Whether a block that reads as zeroes was certainly not written since it was undone. `saved` is the
/// generation of the owner that has saved and undone it, 0 if that is not known, and `volume` is that
/// of the volume's last owner.
///
/// Another owner may have written zeroes, and they are like those of the undo.
#[must_use]
pub fn zeroes_are_of_the_undo(saved: u32, volume: u32) -> bool {
    saved != 0 && saved == volume
}

/// Why saved blocks are not of a volume, or not of its past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotOfVolume {
    /// They are of another volume.
    #[error("the saved blocks are of volume {saved}, and this is volume {volume}")]
    OtherVolume {
        /// The volume of the saved blocks.
        saved: VolumeId,
        /// This volume.
        volume: VolumeId,
    },
    /// They were saved by an owner that this volume has not had yet: its drives are older copies.
    #[error(
        "the saved blocks are of generation {saved}, and the volume has generation {volume}: its \
         drives are older than the saved blocks"
    )]
    Later {
        /// The generation of the owner that has saved them.
        saved: u32,
        /// The generation of the volume.
        volume: u32,
    },
}

/// Checks that saved blocks are of this volume and of its past. `saved` and `volume` are the ids of
/// the volumes and the generations of their owners.
///
/// # Errors
/// [`NotOfVolume`].
pub fn check_origin(saved: (VolumeId, u32), volume: (VolumeId, u32)) -> Result<(), NotOfVolume> {
    if saved.0 != volume.0 {
        return Err(NotOfVolume::OtherVolume { saved: saved.0, volume: volume.0 });
    }
    if saved.1 > volume.1 {
        return Err(NotOfVolume::Later { saved: saved.1, volume: volume.1 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_undone_restored_or_changed() {
        let (zero, saved) = ([0; 8], [0, 7, 0, 0, 0, 0, 0, 0]);
        assert_eq!(BlockNow::of(&zero, &saved), BlockNow::Undone);
        assert_eq!(BlockNow::of(&saved, &saved), BlockNow::Restored);
        assert_eq!(BlockNow::of(&[1; 8], &saved), BlockNow::Changed);
        assert_eq!(BlockNow::of(&zero, &zero), BlockNow::Restored, "nothing is to be done");
    }

    #[test]
    fn zeroes_are_of_the_undo_only_if_no_other_owner_came_since() {
        assert!(zeroes_are_of_the_undo(5, 5));
        assert!(!zeroes_are_of_the_undo(5, 6), "that owner may have written zeroes");
        assert!(!zeroes_are_of_the_undo(0, 5) && !zeroes_are_of_the_undo(0, 0), "not known");
    }

    #[test]
    fn saved_blocks_are_of_the_same_volume_and_of_its_past() {
        let id = |byte| VolumeId([byte; 16]);
        assert_eq!(check_origin((id(1), 5), (id(1), 5)), Ok(()));
        assert_eq!(check_origin((id(1), 0), (id(1), 5)), Ok(()));
        let later = NotOfVolume::Later { saved: 6, volume: 5 };
        assert_eq!(check_origin((id(1), 6), (id(1), 5)), Err(later));
        let other = NotOfVolume::OtherVolume { saved: id(2), volume: id(1) };
        assert_eq!(check_origin((id(2), 1), (id(1), 5)), Err(other));
    }
}
