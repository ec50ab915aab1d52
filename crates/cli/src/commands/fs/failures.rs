//! The exit codes of errors of file systems.

use riopipe_fs::{
    MountError, backing::BackingError, fuse::FuseError, image::ImageError, mkfs::MkfsError,
};

use crate::{
    connect::open_failure,
    failure::{Code, Failure, start_failure},
};

pub(super) fn mkfs_failure(error: &MkfsError) -> Failure {
    let code = match error {
        MkfsError::TooSmall { .. } | MkfsError::NoSize { .. } | MkfsError::Label(_) => Code::Usage,
        MkfsError::HasContent { .. } => Code::Volume,
        MkfsError::InUse { .. } => Code::Media,
        MkfsError::Read(_) | MkfsError::Write(_) => Code::Storage,
        _ => Code::Failed,
    };
    Failure::new(code, "no file system was made").because(error)
}

pub(super) fn image_failure(error: &ImageError) -> Failure {
    match error {
        ImageError::Open { source, .. } => open_failure(source),
        ImageError::Target(source) => start_failure(source),
        ImageError::Drive(_) => Failure::new(Code::Media, error.to_string()),
        ImageError::Os { .. } | ImageError::NotFile { .. } | ImageError::Device { .. } => {
            Failure::new(Code::Failed, error.to_string())
        }
        ImageError::Stop(_) => Failure::storage(&error),
        _ => Failure::new(Code::Volume, error.to_string()),
    }
}

pub(super) fn backing_failure(error: &BackingError) -> Failure {
    match error {
        BackingError::Image(error) => image_failure(error),
        _ => Failure::new(Code::Volume, error.to_string()),
    }
}

/// The failure for a volume that was not closed.
pub(super) fn close_failure(error: &BackingError) -> Failure {
    match error {
        BackingError::Image(error) => image_failure(error),
        _ => Failure::storage(&error),
    }
}

pub(super) fn mount_failure(error: &MountError) -> Failure {
    Failure::new(Code::Volume, "the file system can't be mounted").because(error)
}

pub(super) fn fuse_failure(error: &FuseError) -> Failure {
    let code = match error {
        FuseError::Unmount(_) => Code::Storage,
        _ => Code::Failed,
    };
    Failure::new(code, error.to_string())
}
