//! The options, as structures that begin with their size. Zero means the default in each field.

use std::ffi::c_char;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use riopipe::{
    ConnectOptions, CreateOptions, Dhchap, EngineKind, OpenOptions, ReaderOptions, StreamOptions,
};

use crate::codes::RIOP_OPTION;
use crate::failure::Failure;
use crate::memory::{self, Structure, text_or_null};

/// Zero itself, in a field where 0 means the default.
pub const RIOP_ZERO: u32 = u32::MAX;
/// On, in a field with the default of its own.
pub const RIOP_ON: u32 = 1;
/// Off, in a field with the default of its own.
pub const RIOP_OFF: u32 = 2;

/// See `riop_connect_options` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopConnectOptions {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The host NQN of this initiator.
    pub host_nqn: *const c_char,
    /// The host identifier of this initiator, 16 bytes.
    pub host_id: *const u8,
    /// 1: CRC32C over each header.
    pub header_digest: u32,
    /// [`RIOP_ON`], [`RIOP_OFF`], or 0: on, except over loopback.
    pub data_digest: u32,
    /// The time limit of a connection and of an answer, milliseconds.
    pub timeout_ms: u32,
    /// The keep-alive timeout, milliseconds.
    pub keep_alive_ms: u32,
    /// How long a target may be unreachable, milliseconds.
    pub loss_timeout_ms: u32,
    /// How long to poll before going to sleep, microseconds.
    pub spin_us: u32,
    /// The file with the secret of this host.
    pub dhchap_secret_file: *const c_char,
    /// The file with the secret of the targets.
    pub dhchap_ctrl_secret_file: *const c_char,
}

/// See `riop_create_options` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopCreateOptions {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The options of the connections.
    pub connect: *const RiopConnectOptions,
    /// The name of the engine.
    pub engine: *const c_char,
    /// The size of a stripe unit, blocks.
    pub unit_blocks: u32,
    /// The number of streams.
    pub streams: u32,
    /// Log slots for each stream on each target.
    pub slots: u32,
    /// Blocks of each drive for the prepare area of engine `horae`.
    pub prepare_blocks: u32,
    /// 1: use drives that are in use.
    pub force: u32,
    /// Zero.
    pub reserved: u32,
}

/// See `riop_open_options` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopOpenOptions {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The options of the connections.
    pub connect: *const RiopConnectOptions,
    /// The name of the engine.
    pub engine: *const c_char,
    /// 1: fence an owner that is alive.
    pub take_over: u32,
    /// 1: give up a log that is lost.
    pub accept_lost_log: u32,
    /// 1: check the duties of the caller.
    pub check_ownership: u32,
    /// How long to wait for a volume that is owned, milliseconds.
    pub wait_for_lease_ms: u32,
}

/// See `riop_stream_options` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopStreamOptions {
    /// The size of the structure, bytes.
    pub size: usize,
    /// The bound of the replay memory, bytes.
    pub kept_bytes_max: u64,
    /// Requests in flight for each target.
    pub queue_depth: u32,
    /// How long a target may owe an answer, milliseconds.
    pub timeout_ms: u32,
    /// 1: adjacent requests are not merged.
    pub no_merge: u32,
    /// 1: the writes of the stream have no order.
    pub orderless: u32,
}

/// See `riop_reader_options` in `riopipe.h`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RiopReaderOptions {
    /// The size of the structure, bytes.
    pub size: usize,
    /// How many calls may read at the same time.
    pub concurrent: u32,
    /// Requests in flight for each target and call.
    pub queue_depth: u32,
    /// How long a target may owe an answer, milliseconds.
    pub timeout_ms: u32,
    /// Zero.
    pub reserved: u32,
}

macro_rules! structures {
    ($($structure:ty = $name:literal;)*) => {$(
        // SAFETY: the structure is `repr(C)`, begins with its size, and has only numbers and pointers.
        unsafe impl Structure for $structure {
            const NAME: &'static str = $name;
        }
    )*};
}

structures! {
    RiopConnectOptions = "riop_connect_options";
    RiopCreateOptions = "riop_create_options";
    RiopOpenOptions = "riop_open_options";
    RiopStreamOptions = "riop_stream_options";
    RiopReaderOptions = "riop_reader_options";
}

/// The options of connections.
///
/// # Safety
/// See the [rules](crate#safety).
pub(crate) unsafe fn connect(
    options: *const RiopConnectOptions,
) -> Result<ConnectOptions, Failure> {
    // SAFETY: the caller keeps the rules.
    let given = unsafe { memory::read(options) }?;
    let mut options = ConnectOptions::default();
    // SAFETY: as above.
    if let Some(nqn) = unsafe { text_or_null(given.host_nqn, "host_nqn") }? {
        options.host_nqn = nqn.to_owned();
    }
    if !given.host_id.is_null() {
        // SAFETY: the pointer is not null, and to 16 bytes by the rules.
        options.host_id = unsafe { ptr::read(given.host_id.cast()) };
    }
    options.header_digest = flag(given.header_digest, "header_digest")?;
    options.data_digest = match given.data_digest {
        0 => None,
        RIOP_ON => Some(true),
        RIOP_OFF => Some(false),
        other => return Err(invalid("data_digest", other, "0, RIOP_ON or RIOP_OFF")),
    };
    options.timeout = millis(given.timeout_ms, options.timeout);
    options.keep_alive = millis(given.keep_alive_ms, options.keep_alive);
    options.loss_timeout = millis(given.loss_timeout_ms, options.loss_timeout);
    options.spin = match given.spin_us {
        0 => options.spin,
        RIOP_ZERO => Duration::ZERO,
        us => Duration::from_micros(us.into()),
    };
    // SAFETY: as above.
    let secret = unsafe { text_or_null(given.dhchap_secret_file, "dhchap_secret_file") }?;
    let ctrl_file = given.dhchap_ctrl_secret_file;
    // SAFETY: as above.
    let controller_secret = unsafe { text_or_null(ctrl_file, "dhchap_ctrl_secret_file") }?;
    options.dhchap = dhchap(secret.map(Path::new), controller_secret.map(Path::new))?;
    Ok(options)
}

/// The secrets in these files; `None` if there is no file.
///
/// # Errors
/// [`RIOP_OPTION`]: a file can't be used, or only that of the targets is there.
pub fn dhchap(
    secret: Option<&Path>,
    controller_secret: Option<&Path>,
) -> Result<Option<Dhchap>, Failure> {
    match (secret, controller_secret) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(Failure::new(
            RIOP_OPTION,
            "there is a secret of the targets, but none of this host (dhchap_secret_file)".into(),
        )),
        (Some(secret), controller_secret) => {
            Ok(Some(Dhchap::from_files(secret, controller_secret)?))
        }
    }
}

/// The options of a new volume.
///
/// # Safety
/// See the [rules](crate#safety).
pub(crate) unsafe fn create(options: *const RiopCreateOptions) -> Result<CreateOptions, Failure> {
    // SAFETY: the caller keeps the rules.
    let given = unsafe { memory::read(options) }?;
    reserved(given.reserved)?;
    let default = CreateOptions::default();
    let streams = number(given.streams, default.streams.into());
    let streams = u16::try_from(streams).map_err(|_| invalid("streams", streams, "1 to 1024"))?;
    Ok(CreateOptions {
        unit_blocks: number(given.unit_blocks, default.unit_blocks),
        streams,
        // SAFETY: as above.
        engine: unsafe { engine(given.engine) }?,
        slots: given.slots,
        prepare_blocks: match given.prepare_blocks {
            0 => None,
            RIOP_ZERO => Some(0),
            blocks => Some(blocks),
        },
        force: flag(given.force, "force")?,
        // SAFETY: as above.
        connect: unsafe { connect(given.connect) }?,
    })
}

/// The options for opening a volume.
///
/// # Safety
/// See the [rules](crate#safety).
pub(crate) unsafe fn open(options: *const RiopOpenOptions) -> Result<OpenOptions, Failure> {
    // SAFETY: the caller keeps the rules.
    let given = unsafe { memory::read(options) }?;
    Ok(OpenOptions {
        // SAFETY: as above.
        engine: unsafe { engine(given.engine) }?,
        take_over: flag(given.take_over, "take_over")?,
        wait_for_lease: Duration::from_millis(given.wait_for_lease_ms.into()),
        accept_lost_log: flag(given.accept_lost_log, "accept_lost_log")?,
        check_ownership: flag(given.check_ownership, "check_ownership")?,
        // SAFETY: as above.
        connect: unsafe { connect(given.connect) }?,
    })
}

/// The options of a stream.
///
/// # Safety
/// See the [rules](crate#safety).
pub(crate) unsafe fn stream(options: *const RiopStreamOptions) -> Result<StreamOptions, Failure> {
    // SAFETY: the caller keeps the rules.
    let given = unsafe { memory::read(options) }?;
    let default = StreamOptions::default();
    Ok(StreamOptions {
        queue_depth: depth(given.queue_depth, default.queue_depth),
        kept_bytes_max: match given.kept_bytes_max {
            0 => default.kept_bytes_max,
            bytes => bytes,
        },
        merge: !flag(given.no_merge, "no_merge")?,
        timeout: millis(given.timeout_ms, default.timeout),
        orderless: flag(given.orderless, "orderless")?,
    })
}

/// The options of a reader.
///
/// # Safety
/// See the [rules](crate#safety).
pub(crate) unsafe fn reader(options: *const RiopReaderOptions) -> Result<ReaderOptions, Failure> {
    // SAFETY: the caller keeps the rules.
    let given = unsafe { memory::read(options) }?;
    reserved(given.reserved)?;
    let default = ReaderOptions::default();
    Ok(ReaderOptions {
        concurrent: depth(given.concurrent, default.concurrent),
        queue_depth: depth(given.queue_depth, default.queue_depth),
        timeout: millis(given.timeout_ms, default.timeout),
    })
}

/// # Safety
/// See the [rules](crate#safety).
unsafe fn engine(name: *const c_char) -> Result<Option<EngineKind>, Failure> {
    // SAFETY: the caller keeps the rules.
    let name = unsafe { text_or_null(name, "engine") }?;
    name.map(engine_named).transpose()
}

/// The engine with a name.
///
/// # Errors
/// [`RIOP_OPTION`]: there is no such engine.
pub fn engine_named(name: &str) -> Result<EngineKind, Failure> {
    EngineKind::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = EngineKind::ALL.iter().map(|kind| kind.name()).collect();
        let text = format!("there is no engine {name:?}; the engines are {}", names.join(", "));
        Failure::new(RIOP_OPTION, text)
    })
}

fn flag(value: u32, name: &str) -> Result<bool, Failure> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(invalid(name, value, "0 or 1")),
    }
}

fn reserved(value: u32) -> Result<(), Failure> {
    if value == 0 { Ok(()) } else { Err(invalid("reserved", value, "0")) }
}

fn invalid(name: &str, value: u32, valid: &str) -> Failure {
    Failure::new(RIOP_OPTION, format!("the option {name} is {value}; it must be {valid}"))
}

fn number(value: u32, default: u32) -> u32 {
    if value == 0 { default } else { value }
}

fn depth(value: u32, default: usize) -> usize {
    if value == 0 { default } else { value as usize }
}

fn millis(value: u32, default: Duration) -> Duration {
    match value {
        0 => default,
        RIOP_ZERO => Duration::ZERO,
        ms => Duration::from_millis(ms.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs::Permissions;
    use std::mem::size_of;
    use std::os::unix::fs::PermissionsExt;

    use riopipe::DhchapSecret;

    use super::*;

    /// A structure of zeroes with its size.
    fn empty<T: Structure>() -> T {
        // SAFETY: null is allowed.
        let mut empty: T = unsafe { memory::read(ptr::null()) }.unwrap();
        // SAFETY: the structure begins with its size.
        unsafe { (&raw mut empty).cast::<usize>().write(size_of::<T>()) };
        empty
    }

    #[test]
    fn zeroes_and_null_are_the_defaults() {
        // SAFETY: the pointers are null or to whole structures, here and below.
        unsafe {
            let of_zeroes = create(&empty::<RiopCreateOptions>()).unwrap();
            assert_eq!((of_zeroes, create(ptr::null()).unwrap()), Default::default());
            let of_zeroes = open(&empty::<RiopOpenOptions>()).unwrap();
            assert_eq!((of_zeroes, open(ptr::null()).unwrap()), Default::default());
            let of_zeroes = stream(&empty::<RiopStreamOptions>()).unwrap();
            assert_eq!((of_zeroes, stream(ptr::null()).unwrap()), Default::default());
            let of_zeroes = reader(&empty::<RiopReaderOptions>()).unwrap();
            assert_eq!((of_zeroes, reader(ptr::null()).unwrap()), Default::default());
            let of_zeroes = connect(&empty::<RiopConnectOptions>()).unwrap();
            assert_eq!((of_zeroes, connect(ptr::null()).unwrap()), Default::default());
        }
    }

    #[test]
    fn each_option_arrives() {
        let host_id = [7; 16];
        let given = RiopConnectOptions {
            host_nqn: c"nqn.2026-01.org.example:host".as_ptr(),
            host_id: host_id.as_ptr(),
            header_digest: 1,
            data_digest: RIOP_OFF,
            timeout_ms: 1,
            keep_alive_ms: 2,
            loss_timeout_ms: RIOP_ZERO,
            spin_us: RIOP_ZERO,
            ..empty::<RiopConnectOptions>()
        };
        let expected = ConnectOptions {
            host_nqn: "nqn.2026-01.org.example:host".into(),
            host_id,
            dhchap: None,
            tls: None,
            header_digest: true,
            data_digest: Some(false),
            timeout: Duration::from_millis(1),
            keep_alive: Duration::from_millis(2),
            loss_timeout: Duration::ZERO,
            spin: Duration::ZERO,
        };
        let connect = &raw const given;
        let given = RiopCreateOptions {
            connect,
            engine: c"horae".as_ptr(),
            unit_blocks: 1,
            streams: 2,
            slots: 3,
            prepare_blocks: RIOP_ZERO,
            force: 1,
            ..empty::<RiopCreateOptions>()
        };
        let created = CreateOptions {
            unit_blocks: 1,
            streams: 2,
            engine: Some(EngineKind::Horae),
            slots: 3,
            prepare_blocks: Some(0),
            force: true,
            connect: expected.clone(),
        };
        // SAFETY: the pointers are to whole structures, here and below.
        assert_eq!(unsafe { create(&raw const given) }.unwrap(), created);
        let given = RiopOpenOptions {
            connect,
            engine: c"sync".as_ptr(),
            take_over: 1,
            accept_lost_log: 1,
            check_ownership: 1,
            wait_for_lease_ms: 4,
            ..empty::<RiopOpenOptions>()
        };
        let opened = OpenOptions {
            engine: Some(EngineKind::Sync),
            take_over: true,
            wait_for_lease: Duration::from_millis(4),
            accept_lost_log: true,
            check_ownership: true,
            connect: expected,
        };
        // SAFETY: as above.
        assert_eq!(unsafe { open(&raw const given) }.unwrap(), opened);
        let given = RiopStreamOptions {
            kept_bytes_max: 1,
            queue_depth: 2,
            timeout_ms: 3,
            no_merge: 1,
            orderless: 1,
            ..empty::<RiopStreamOptions>()
        };
        let timeout = Duration::from_millis(3);
        let streamed = StreamOptions {
            queue_depth: 2,
            kept_bytes_max: 1,
            merge: false,
            timeout,
            orderless: true,
        };
        // SAFETY: as above.
        assert_eq!(unsafe { stream(&raw const given) }.unwrap(), streamed);
        let given = RiopReaderOptions {
            concurrent: 1,
            queue_depth: 2,
            timeout_ms: 3,
            ..empty::<RiopReaderOptions>()
        };
        let read = ReaderOptions { concurrent: 1, queue_depth: 2, timeout };
        // SAFETY: as above.
        assert_eq!(unsafe { reader(&raw const given) }.unwrap(), read);
    }

    #[test]
    fn secrets_arrive_from_their_files() {
        let dir = tempfile::tempdir().unwrap();
        let secret = |name: &str, byte| {
            let secret = DhchapSecret::new(&[byte; 32], None).unwrap();
            let path = dir.path().join(name);
            std::fs::write(&path, &*secret.to_text()).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            (secret, CString::new(path.to_str().unwrap()).unwrap())
        };
        let (of_host, host_file) = secret("host", 1);
        let (of_targets, targets_file) = secret("targets", 2);
        let given = RiopConnectOptions {
            dhchap_secret_file: host_file.as_ptr(),
            dhchap_ctrl_secret_file: targets_file.as_ptr(),
            ..empty::<RiopConnectOptions>()
        };
        // SAFETY: the pointer is to a whole structure.
        let options = unsafe { connect(&raw const given) }.unwrap();
        let expected = Dhchap { secret: of_host, controller_secret: Some(of_targets) };
        assert_eq!(options.dhchap, Some(expected));
    }

    #[test]
    fn invalid_options_are_refused_by_name() {
        fn refused<T: std::fmt::Debug>(result: Result<T, Failure>, name: &str) {
            let failure = result.unwrap_err();
            assert_eq!(failure.code, RIOP_OPTION);
            assert!(failure.text.contains(name), "{}", failure.text);
        }
        // SAFETY: the pointers are to whole structures.
        unsafe {
            let given = RiopOpenOptions { take_over: 2, ..empty::<RiopOpenOptions>() };
            refused(open(&raw const given), "take_over");
            let given = RiopOpenOptions { engine: c"fast".as_ptr(), ..empty::<RiopOpenOptions>() };
            refused(open(&raw const given), "barrier");
            let given = RiopCreateOptions { streams: 65_536, ..empty::<RiopCreateOptions>() };
            refused(create(&raw const given), "streams");
            let given = RiopCreateOptions { reserved: 1, ..empty::<RiopCreateOptions>() };
            refused(create(&raw const given), "reserved");
            let given = RiopConnectOptions { data_digest: 3, ..empty::<RiopConnectOptions>() };
            refused(connect(&raw const given), "data_digest");
        }
    }
}
