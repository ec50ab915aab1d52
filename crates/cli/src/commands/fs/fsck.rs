//! `rio fs fsck`

use std::process::Command;

use riopipe_fs::{
    backing::{Backing, FsOptions},
    fuse::unmount_unserved,
    image::ImageOptions,
    mkfs::find_e2fs_program,
};
use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use super::{
    Recovered,
    failures::{backing_failure, close_failure, fuse_failure, mount_failure},
};
use crate::{
    args::fs::Fsck as Args,
    failure::{Code, Failure},
    output::{Output, Report},
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let program = find_e2fs_program("e2fsck").ok_or_else(|| {
        Failure::new(Code::Failed, "e2fsck is missing")
            .hint("it is in the package e2fsprogs (apt-get install e2fsprogs)")
    })?;
    let options = ImageOptions { accept_lost_log: args.accept_lost_log };
    let (backing, recovery) =
        Backing::of_image(&args.file, &options).map_err(|error| backing_failure(&error))?;
    if !recovery.is_nothing() {
        output.note(recovery.to_string());
    }
    let recovered = backing.mount(&FsOptions::default()).map_err(|error| mount_failure(&error));
    let recovered = recovered.and_then(|(fs, report)| {
        unmount_unserved(&fs).map_err(|error| fuse_failure(&error))?;
        Ok(Recovered::of(&report))
    });
    let closed = backing.close().map_err(|error| close_failure(&error));
    let recovered = recovered?;
    closed?;
    let checked = Command::new(program).arg("-fn").arg("--").arg(&args.file).output();
    let checked =
        checked.map_err(|error| Failure::new(Code::Failed, "can't run e2fsck").because(&error))?;
    let text = String::from_utf8_lossy(&checked.stdout).into_owned();
    let is_clean = checked.status.success();
    output.result(&Checked {
        schema: "rio-fs-fsck/1",
        file: args.file.display().to_string(),
        clean: is_clean,
        recovered,
        e2fsck: text,
    })?;
    match is_clean {
        true => Ok(()),
        false => Err(Failure::new(Code::Differs, "e2fsck has found damage")
            .hint(format!("`e2fsck -f {}` repairs it", args.file.display()))),
    }
}

/// A file system that was checked.
#[derive(Debug, Serialize)]
struct Checked {
    schema: &'static str,
    file: String,
    clean: bool,
    recovered: Recovered,
    e2fsck: String,
}

impl Report for Checked {
    fn text(&self, _: &Terminal) -> String {
        match self.clean {
            true => format!("{}: clean; {}\n", self.file, self.recovered.text()),
            false => {
                format!("{}\n{}: damaged; {}\n", self.e2fsck, self.file, self.recovered.text())
            }
        }
    }
}
