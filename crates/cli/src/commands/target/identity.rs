//! `rio target identity`

use riopipe_lab::terminal::Terminal;
use riopipe_media::OpenError;
use riopipe_target::{IdentityError, ShownIdentity, drive_identity};
use serde::Serialize;

use crate::{
    args::target::Identity,
    failure::{Code, Failure},
    output::{Output, Report},
};

/// The identity of a drive. `identity` is its origin.
#[derive(Debug, Serialize)]
pub(super) struct IdentityView {
    pub(super) nguid: String,
    pub(super) uuid: String,
    pub(super) identity: String,
}

impl IdentityView {
    pub(super) fn of(identity: &ShownIdentity) -> Self {
        Self {
            nguid: identity.nguid.clone(),
            uuid: identity.uuid.clone(),
            identity: identity.origin.to_string(),
        }
    }
}

#[derive(Debug, Serialize)]
struct DriveView {
    schema: &'static str,
    drive: String,
    /// Absent if the drive has no identity of its own.
    #[serde(flatten)]
    identity: Option<IdentityView>,
}

impl Report for DriveView {
    fn text(&self, _: &Terminal) -> String {
        match &self.identity {
            Some(IdentityView { nguid, uuid, identity }) => {
                format!("{}: {identity}\n  NGUID {nguid}\n  UUID  {uuid}\n", self.drive)
            }
            None => format!(
                "{}: no identity of its own; a file gets one when it is served, other drives have \
                 one by NQN and namespace id\n",
                self.drive
            ),
        }
    }
}

pub(super) fn run(args: &Identity, output: &Output) -> Result<(), Failure> {
    let identity =
        drive_identity(&args.drive, args.adopt).map_err(|error| failure(args, &error))?;
    output.result(&DriveView {
        schema: "rio-target-identity/1",
        drive: args.drive.clone(),
        identity: identity.as_ref().map(IdentityView::of),
    })
}

fn failure(args: &Identity, error: &IdentityError) -> Failure {
    let message = format!("the identity of {}", args.drive);
    let code = match error {
        IdentityError::Open(OpenError::Spec { .. }) => Code::Usage,
        _ => Code::Media,
    };
    let failure = Failure::new(code, message).because(error);
    match error {
        IdentityError::Adopt(_) => failure.hint(
            "a configuration file may give the drive's namespace the NGUID that the volume knows \
             (nguid = \"…\"), which `rio volume show` prints with -o json",
        ),
        _ => failure,
    }
}
