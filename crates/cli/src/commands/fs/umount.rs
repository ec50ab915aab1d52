//! `rio fs umount`: an unmount that waits until all is durable.

use std::io;

use riopipe_fs::control::{AskError, Waiting};
use riopipe_lab::terminal::Terminal;
use serde::Serialize;

use super::{ask_failure, mount_of, not_mounted};
use crate::{
    args::fs::Umount as Args,
    failure::{Code, Failure},
    interrupt::Interrupt,
    output::{Output, Report},
};

pub(super) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let interrupt = Interrupt::watch_silently()?;
    let mount = mount_of(&args.place)?.ok_or_else(|| not_mounted(&args.place))?;
    let directory = mount.directory.display().to_string();
    let waiting = match Waiting::begin(&mount, args.force) {
        Ok(waiting) => waiting,
        Err(error @ AskError::NotServed { .. }) => {
            mount.take_off().map_err(|error| refused(&directory, &error))?;
            return Err(ask_failure(&error).hint("it was taken off now"));
        }
        Err(error) => return Err(ask_failure(&error)),
    };
    if !args.force {
        // The process that serves it then ends by itself.
        mount.unmount().map_err(|error| refused(&directory, &error))?;
    }
    let ended = waiting.wait(|| interrupt.requested()).map_err(|error| match error {
        AskError::NotServed { .. } => Failure::new(
            Code::Storage,
            format!("the process that served {directory} has ended before it was done"),
        )
        .hint("the next mount, or `rio fs fsck`, recovers the file system"),
        error => ask_failure(&error),
    })?;
    match ended {
        None => Err(Failure::new(
            Code::Interrupted,
            format!("interrupted: the process that serves {directory} goes on by itself"),
        )),
        Some(outcome) => match outcome.error {
            None => output.result(&Unmounted {
                schema: "rio-fs-umount/1",
                place: mount.source.to_string_lossy().into_owned(),
                directory,
            }),
            Some(why) => Err(Failure::new(Code::Storage, format!("{directory}: {why}"))),
        },
    }
}

fn refused(directory: &str, error: &io::Error) -> Failure {
    let failure = Failure::new(Code::Failed, format!("can't unmount {directory}"));
    match error.kind() {
        io::ErrorKind::ResourceBusy => Failure::new(
            Code::Failed,
            format!("{directory} is in use: a program has files open there, or works in it"),
        )
        .hint(format!(
            "`fuser -vm {directory}` lists the programs; `rio fs umount --force` unmounts even so, \
             and what they have written becomes durable"
        )),
        io::ErrorKind::NotFound => failure
            .because(error)
            .hint("users other than root need fusermount3: apt-get install fuse3"),
        _ => failure.because(error),
    }
}

/// A file system that was unmounted.
#[derive(Debug, Serialize)]
struct Unmounted {
    schema: &'static str,
    place: String,
    directory: String,
}

impl Report for Unmounted {
    fn text(&self, _: &Terminal) -> String {
        format!("{}: unmounted from {}, all is durable\n", self.place, self.directory)
    }
}
