//! From the command line to the library: identity, members, and exit codes of the library's errors.

use std::path::Path;

use riopipe::{
    AttachError, CallError, ClaimError, ConnectOptions, CreateError, Dhchap, EngineUnavailable,
    MemberAddr, OpenError, RecoverError, StreamError, Volume, VolumeInfo,
    cause::{AssembleError, Lack, OpeningError, SessionError},
};
use riopipe_target::SecretSource;

use crate::{
    args::{
        connect::{Connect, Digest},
        values,
        volume::Members,
    },
    failure::{Code, Failure},
    known_volumes::{KnownError, KnownVolume, Places, StoredDigest, VARIABLE},
};

/// The options of a connection, from the command line.
///
/// # Errors
/// A secret can't be read.
pub fn connect_options(args: &Connect) -> Result<ConnectOptions, Failure> {
    let mut options = ConnectOptions {
        header_digest: args.hdr_digest,
        data_digest: match args.data_digest {
            Digest::Auto => None,
            Digest::On => Some(true),
            Digest::Off => Some(false),
        },
        timeout: args.timeout,
        loss_timeout: args.loss_timeout,
        ..ConnectOptions::default()
    };
    if let Some(nqn) = &args.hostnqn {
        options.host_nqn.clone_from(nqn);
    }
    if let Some(id) = args.hostid {
        options.host_id = id;
    }
    let read = |source: &SecretSource| {
        source.read().map_err(|(what, advice)| Failure::new(Code::Usage, what).hint(advice))
    };
    if let Some(source) = &args.dhchap_secret {
        let controller_secret = args.dhchap_ctrl_secret.as_ref().map(read).transpose()?;
        options.dhchap = Some(Dhchap { secret: read(source)?, controller_secret });
    }
    if let Some(source) = &args.tls_psk {
        let psk = source.read_psk();
        let unread = |(what, advice): (String, _)| Failure::new(Code::Usage, what).hint(advice);
        options.tls = Some(psk.map_err(unread)?);
    }
    Ok(options)
}

/// The members, in order.
///
/// # Errors
/// The first text that is not an address.
pub fn members(texts: &[String]) -> Result<Vec<MemberAddr>, Failure> {
    let parse = |text: &String| {
        text.parse::<MemberAddr>().map_err(|error| Failure::new(Code::Usage, error.to_string()))
    };
    if texts.is_empty() {
        return Err(Failure::new(Code::Usage, "no drives: give them with -m, once for each"));
    }
    texts.iter().map(parse).collect()
}

/// The members of a volume in order, and the options to connect to them: those of the command line,
/// or, without `-m`, those that the file of known volumes has for `name`. In the second case, they
/// must have the volume with the id in the file.
///
/// # Errors
/// A text is not an address, or the file of known volumes is damaged or does not have the volume, or
/// its members can't be reached or have another volume.
pub fn members_and_options(
    name: Option<&str>,
    args: &Members,
) -> Result<(Vec<MemberAddr>, ConnectOptions), Failure> {
    match name {
        Some(name) if args.members.is_empty() => {
            known_members(name, args.volumes_file.as_deref(), &args.connect)
        }
        _ => Ok((members(&args.members)?, connect_options(&args.connect)?)),
    }
}

/// As [`members_and_options`], but the members may have any volume. The third part is the id in the
/// file of known volumes, if the members come from there and the entry has one: the caller checks it.
///
/// # Errors
/// As [`members_and_options`], but no member is connected to.
pub fn unchecked_members(
    name: Option<&str>,
    args: &Members,
) -> Result<(Vec<MemberAddr>, ConnectOptions, Option<String>), Failure> {
    match name {
        Some(name) if args.members.is_empty() => {
            found_in_file(name, args.volumes_file.as_deref(), &args.connect)
        }
        _ => Ok((members(&args.members)?, connect_options(&args.connect)?, None)),
    }
}

/// The members that the file of known volumes has for `name`, and the options to connect to them.
/// If the entry has an id, the members must have that volume.
///
/// # Errors
/// The file of known volumes is damaged, or does not have the volume, or its members can't be reached
/// or have another volume.
pub fn known_members(
    name: &str,
    volumes_file: Option<&Path>,
    args: &Connect,
) -> Result<(Vec<MemberAddr>, ConnectOptions), Failure> {
    let (addresses, options, id) = found_in_file(name, volumes_file, args)?;
    if let Some(id) = id {
        match Volume::inspect(&addresses, &options) {
            Ok(info) if info.id.to_string() == id => {}
            Ok(info) => return Err(another_volume(name, &id, &info.name, &info.id.to_string())),
            Err(error @ (OpenError::Attach(_) | OpenError::Call { .. })) => {
                return Err(open_failure(&error));
            }
            // They make no volume, so nothing is done to one: the command itself finds why.
            Err(_) => {}
        }
    }
    Ok((addresses, options))
}

fn found_in_file(
    name: &str,
    volumes_file: Option<&Path>,
    args: &Connect,
) -> Result<(Vec<MemberAddr>, ConnectOptions, Option<String>), Failure> {
    let places = Places::of(volumes_file);
    let known = places.find(name).map_err(|error| known_failure(&error))?;
    let known = known.ok_or_else(|| unknown_volume(name, &places))?;
    let options = with_stored(connect_options(args)?, args, &known)?;
    Ok((members(&known.members)?, options, known.id))
}

/// The failure for members that have another volume than the file of known volumes has for `name`.
#[must_use]
pub fn another_volume(name: &str, id: &str, found_name: &str, found_id: &str) -> Failure {
    let message = format!(
        "volume {name:?} has id {id} in the file of known volumes, and its drives there have volume \
         {found_name:?} with id {found_id}: nothing is done to it"
    );
    Failure::new(Code::Volume, message).hint(
        "if that is the volume you mean, name its drives with -m; `rio volume show NAME --keep -m DRIVE` \
         corrects the file",
    )
}

/// The failure for a volume that no file of known volumes has.
fn unknown_volume(name: &str, places: &Places) -> Failure {
    let paths: Vec<String> = places.paths().map(|path| path.display().to_string()).collect();
    let cause = match paths.is_empty() {
        true => format!("{VARIABLE} is empty, so no file of known volumes is read"),
        false => format!("{} has no such entry", paths.join(" or ")),
    };
    Failure::new(Code::Usage, format!("the drives of volume {name:?} are not known: {cause}"))
        .hint("give them with -m, once for each, in the volume's order")
}

/// The options, with those that the file has for the volume where the command line has none.
fn with_stored(
    options: ConnectOptions,
    args: &Connect,
    known: &KnownVolume,
) -> Result<ConnectOptions, Failure> {
    let mut options = options;
    options.header_digest |= known.hdr_digest;
    if args.data_digest == Digest::Auto {
        options.data_digest = known.data_digest.map(|digest| digest == StoredDigest::On);
    }
    let usage = |what: &str| Failure::new(Code::Usage, format!("the known volumes: {what}"));
    if let (None, Some(nqn)) = (&args.hostnqn, &known.hostnqn) {
        options.host_nqn = values::nqn(nqn).map_err(|what| usage(&what))?;
    }
    if let (None, Some(id)) = (args.hostid, &known.hostid) {
        options.host_id = values::host_id(id).map_err(|what| usage(&what))?;
    }
    Ok(options)
}

/// The entry of a new volume in the file of known volumes.
#[must_use]
pub fn known_volume(info: &VolumeInfo, args: &Connect) -> KnownVolume {
    let hex = |id: [u8; 16]| format!("{:032x}", u128::from_be_bytes(id));
    KnownVolume {
        id: Some(info.id.to_string()),
        members: info.members.iter().map(|member| member.addr.to_string()).collect(),
        hostnqn: args.hostnqn.clone(),
        hostid: args.hostid.map(hex),
        hdr_digest: args.hdr_digest,
        data_digest: match args.data_digest {
            Digest::Auto => None,
            Digest::On => Some(StoredDigest::On),
            Digest::Off => Some(StoredDigest::Off),
        },
    }
}

/// The failure of an access to the file of known volumes.
#[must_use]
pub fn known_failure(error: &KnownError) -> Failure {
    let code = match error {
        KnownError::Damaged { .. } | KnownError::Newer { .. } => Code::Usage,
        _ => Code::Failed,
    };
    Failure::new(code, error.to_string())
        .hint(format!("{VARIABLE} or --volumes-file names another file; -m needs none"))
}

/// The failure for a target that is unreachable, or that refuses the connection.
#[must_use]
pub fn attach_failure(error: &AttachError) -> Failure {
    let failure = Failure::new(Code::Connection, error.to_string());
    match error {
        AttachError::Target {
            source: CallError::Session(SessionError::HostNotAllowed { .. }),
            ..
        } => failure.hint(
            "`rio target serve --allow-host` admits a host; -q gives this host another name (names are \
             no proof of anything)",
        ),
        AttachError::Target {
            source: CallError::Session(SessionError::Authentication { .. }),
            ..
        } => failure.hint(
            "--dhchap-secret gives the file with this host's secret, and -q the name that the target \
             has it for",
        ),
        AttachError::Target {
            source: CallError::Session(SessionError::NotAuthenticated { .. }),
            ..
        } => failure.hint("the target's messages have the reason; both sides need the same secret"),
        AttachError::Target { source: CallError::Closed | CallError::Broken(_), .. } => failure.hint(
            "a target that demands TLS does so: --tls-psk gives the file with this host's key. Its messages \
             have the reason",
        ),
        AttachError::Target { .. } => {
            failure.hint("`rio discover -a ADDR -s PORT` lists the NQNs that are offered there")
        }
        // The others name the remedy themselves.
        _ => failure,
    }
}

/// The exit code of a request that a target refused, or did not answer.
pub(crate) fn call_code(error: &CallError) -> Code {
    match error {
        CallError::Status(_) => Code::Volume,
        _ => Code::Connection,
    }
}

/// The failure for a volume that can't be created.
#[must_use]
pub fn create_failure(name: &str, error: &CreateError) -> Failure {
    let code = match error {
        CreateError::Attach(error) => return attach_failure(error),
        CreateError::Name | CreateError::Options(_) | CreateError::Twice(_) => Code::Usage,
        CreateError::Call { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    let failure = Failure::new(code, format!("can't create volume {name:?}")).because(error);
    match error {
        CreateError::InUse { .. } => {
            failure.hint("--force gives the other volume up, with all that is on it")
        }
        CreateError::UnreadableLabel { .. } => failure.hint(
            "--force gives up the volume that the drive may belong to, with all that is on it",
        ),
        CreateError::HoldsData { .. } => failure.hint(
            "check that this is the right drive; --force erases what it holds, and creates the volume",
        ),
        CreateError::LogTooSmall { .. } | CreateError::LogDirectoryFull { .. } => failure.hint(
            "each stream needs 256 + 64 × slots bytes, rounded up to 4096 (--streams, --slots). \
             `rio volume list -m TARGET` names the volumes in the log, `rio volume delete NAME|ID` \
             frees the space of one",
        ),
        CreateError::Engine { lack: Lack::Log, .. } => {
            failure.hint("`rio target serve --log` gives a target an ordering log")
        }
        CreateError::Engine { lack: Lack::Order(_), .. } => {
            failure.hint("`rio target serve --drive ssd:…,order=barrier` serves such a drive, and order=op the other kind")
        }
        CreateError::ReadBack(error) => hinted(failure, open_hint(error)),
        _ => failure,
    }
}

fn hinted(failure: Failure, hint: Option<&'static str>) -> Failure {
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

const ACCEPT: &str = "to accept the loss, `rio volume recover NAME --accept-lost-log`: then nothing is \
    undone on any target, and what is in doubt is listed";
const ACCEPT_AT_TARGET: &str = "to accept the loss, start the target once with --accept-lost-log, and then \
    `rio volume recover NAME --accept-lost-log`: then nothing is undone on any target, and what is in \
    doubt is listed";
const NO_LOG: &str = "`rio target serve --log` starts the target with the volume's log; if that log is lost, \
    start it with a new one, or without one (the engine is then sync), and \
    `rio volume recover NAME --accept-lost-log`: then nothing is undone on any target, and what is in \
    doubt is listed";
const ADOPT: &str = "if it was moved, and the original is gone: stop its target, let it adopt its identity \
    with `rio target identity DRIVE --adopt`, and start the target again";
const FENCE: &str = "--take-over fences an owner that is there";

/// The way to the volume's own engine, if this program has one.
#[must_use]
pub fn engine_hint(why: &EngineUnavailable) -> Option<&'static str> {
    match why {
        EngineUnavailable::Target { lack: Lack::Log, .. } => Some(
            "for engine rio, `rio target serve --log` starts the target with a log, and \
             `rio volume recover NAME --accept-lost-log` gives the volume space in it",
        ),
        EngineUnavailable::LogGivenUp { .. } => {
            Some("`rio volume recover NAME --accept-lost-log` gives the volume space in that log")
        }
        _ => None,
    }
}

/// Which option of this program helps, if one does.
fn open_hint(error: &OpenError) -> Option<&'static str> {
    match error {
        OpenError::Claim { error, .. } => claim_hint(error),
        OpenError::Assemble { error: AssembleError::LogDue { blank: true, .. }, .. } => {
            Some(NO_LOG)
        }
        OpenError::Assemble { error: AssembleError::LogDue { blank: false, .. }, .. } => {
            Some(ACCEPT)
        }
        OpenError::Assemble { error: AssembleError::Copied { .. }, .. } => Some(ADOPT),
        OpenError::Recover(error) => recover_hint(error),
        _ => None,
    }
}

fn claim_hint(error: &ClaimError) -> Option<&'static str> {
    match error {
        ClaimError::Owned { lease_left_ms: 0, .. } => {
            Some("if that owner is gone for good: --take-over")
        }
        ClaimError::Owned { .. } => {
            Some("--wait waits for the owner's lease; if it is gone for good: --take-over")
        }
        ClaimError::LogLost { .. } => Some(ACCEPT_AT_TARGET),
        ClaimError::LogDamaged { .. }
        | ClaimError::LogMissing { .. }
        | ClaimError::LogGivenUp { .. }
        | ClaimError::LogBehind { .. } => Some(ACCEPT),
        ClaimError::NoLog { .. } => Some(NO_LOG),
        _ => None,
    }
}

fn recover_hint(error: &RecoverError) -> Option<&'static str> {
    match error {
        RecoverError::Lost { .. } => Some(FENCE),
        RecoverError::Opening { error, .. } => match error {
            OpeningError::TakenOver { .. } => Some(FENCE),
            OpeningError::Decide(_) | OpeningError::Outside { .. } => Some(ACCEPT),
            OpeningError::Claim(error) => claim_hint(error),
            _ => None,
        },
        _ => None,
    }
}

/// The failure for a volume that can't be opened or inspected.
#[must_use]
pub fn open_failure(error: &OpenError) -> Failure {
    let code = match error {
        OpenError::Attach(error) => return attach_failure(error),
        OpenError::Call { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    hinted(Failure::new(code, error.to_string()), open_hint(error))
}

/// The failure for a stream that can't be opened.
#[must_use]
pub fn stream_failure(error: &StreamError) -> Failure {
    let code = match error {
        StreamError::Connect(_) => Code::Connection,
        StreamError::Target { source, .. } => call_code(source),
        _ => Code::Volume,
    };
    let hint = match error {
        StreamError::InPlacePending { .. } => {
            Some("`rio volume recover` lists them, and with --acknowledge acknowledges them")
        }
        StreamError::Recover(error) => recover_hint(error),
        _ => None,
    };
    hinted(Failure::new(code, error.to_string()), hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_option_can_do_is_hinted_at() {
        let of =
            |error| open_failure(&OpenError::Claim { volume: "v".into(), target: None, error });
        let owned = |lease_left_ms| {
            let error = ClaimError::Owned { target: 0, owner: "nqn.x".into(), lease_left_ms };
            of(error).hint.unwrap_or_default()
        };
        assert!(owned(0).contains("--take-over") && !owned(0).contains("--wait"));
        assert!(owned(1).contains("--take-over") && owned(1).contains("--wait"));
        let missing = of(ClaimError::LogMissing { target: 0 });
        assert!(missing.hint.is_some_and(|hint| hint.contains("--accept-lost-log")));
        assert!(!missing.message.contains("--"), "{}", missing.message);
        let without = of(ClaimError::NoLog { target: 0 }).hint.unwrap_or_default();
        assert!(without.contains("serve --log") && without.contains("--accept-lost-log"));
        assert_eq!(of(ClaimError::Generations).hint, None);
    }

    fn one(text: &str) -> Result<MemberAddr, Failure> {
        members(&[text.to_owned()]).map(|mut members| members.remove(0))
    }

    #[test]
    fn members_in_all_forms() {
        for (text, host, port) in [
            ("192.0.2.1", "192.0.2.1", 4420),
            ("192.0.2.1:7", "192.0.2.1", 7),
            ("::1", "::1", 4420),
            ("[::1]:7", "::1", 7),
            ("::1,ns=2", "::1", 4420),
            ("box,nqn=nqn.2026-11.com.example:a", "box", 4420),
        ] {
            let member = one(text).unwrap();
            assert_eq!((member.host.as_str(), member.port), (host, port), "{text}");
        }
        assert_eq!(one("::1,ns=2").unwrap().nsid, 2);
    }

    #[test]
    fn a_bad_member_is_a_usage_error_that_shows_how() {
        for text in ["", "a:b", "4420", "a,ns=x", "a:0", "a,colour=red"] {
            let failure = one(text).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{text}");
            assert!(failure.message.contains("ADDR[:PORT]"), "{failure}");
        }
    }
}
