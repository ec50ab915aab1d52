//! `rio volume attach`: a volume as a plain block device, with real processes. The host is a volume with
//! engine `sync` on it, which uses plain writes and FLUSHes only.

use std::{
    collections::{BTreeMap, VecDeque},
    error::Error,
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::UnixStream,
    path::Path,
    process::Child,
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use riopipe::{
    ConnectOptions, CreateOptions, EngineKind, MemberAddr, OpenOptions, Place, ReaderOptions,
    StreamOptions, Until, Volume,
};
use serde_json::Value;

use crate::{
    serve::{serve, served, signal},
    site::{LIMIT, content, finish, keys, rio_in, start_in},
};

const NQN: &str = "nqn.2026-11.com.example:attached";

/// Serves a member of the volume. It comes back at the same address.
fn member(folder: &Path, number: usize, address: Option<&str>) -> (Child, String) {
    let (drive, log) =
        (format!("file:drive{number},size=32M"), format!("file:log{number},size=2M"));
    let nqn = format!("nqn.2026-11.com.example:member{number}");
    let words = ["--drive", &drive, "--log", &log, "--reactors", "1", "-n", &nqn];
    let (child, printed) = match address {
        None => serve(folder, &words),
        Some(address) => {
            let mut args = vec!["target", "serve", "-a", address, "-o", "json"];
            args.extend(words);
            served(start_in(folder, &args))
        }
    };
    (child, printed["addresses"][0].as_str().unwrap().to_owned())
}

/// The same member after its process has died.
fn member_again(folder: &Path, number: usize, members: &[String]) -> Child {
    member(folder, number, Some(&members[number])).0
}

/// Attaches volume `outer`.
fn attach(folder: &Path, listen: &str, members: &[String], words: &[&str]) -> (Child, Value) {
    let mut args =
        vec!["volume", "attach", "outer", "--listen", listen, "--nqn", NQN, "-o", "json"];
    for member in members {
        args.extend(["-m", member]);
    }
    args.extend(["--timeout", "60"]);
    args.extend(words);
    served(start_in(folder, &args))
}

/// A loopback address that is free now.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn create_outer(folder: &Path, members: &[String]) {
    let mut args = vec!["volume", "create", "outer", "--streams", "3", "-o", "json"];
    for member in members {
        args.extend(["-m", member]);
    }
    rio_in(folder, &args).ok();
}

#[test]
fn it_serves_a_plain_drive_and_ends_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let served: Vec<_> = (0..2).map(|number| member(folder, number, None)).collect();
    let members: Vec<String> = served.iter().map(|(_, address)| address.clone()).collect();
    create_outer(folder, &members);
    std::fs::write(folder.join("a"), content(3_000_001)).unwrap();

    let (child, printed) = attach(folder, "127.0.0.1:0", &members, &[]);
    assert_eq!(keys(&printed), "bytes nvme schema volume");
    assert_eq!(keys(&printed["nvme"]), "address connect nsid subnqn");
    assert_eq!((&printed["nvme"]["subnqn"], &printed["volume"]), (&NQN.into(), &"outer".into()));
    let address = printed["nvme"]["address"].as_str().unwrap().to_owned();
    let inner = format!("{address},nqn={NQN}");
    let port = address.rsplit(':').next().unwrap();
    let connect = format!("nvme connect -t tcp -a 127.0.0.1 -s {port} -n {NQN}");
    assert_eq!(printed["nvme"]["connect"], connect);
    let inner = |verb: &str, words: &[&str]| {
        let args = [&["volume", verb, "inner"], words, &["-m", &inner, "-o", "json"]].concat();
        rio_in(folder, &args)
    };
    let created = inner("create", &[]).ok();
    assert_eq!(created["engine"], "sync", "it is a drive as any other");
    inner("write", &["a"]).ok();
    inner("verify", &["a"]).ok();

    // While it has the volume, it is the owner.
    let second = ["volume", "attach", "outer", "-m", &members[0], "-m", &members[1], "-o", "json"];
    rio_in(folder, &second).failed(4, &["owned", "--take-over"]);
    signal(&child, "-TERM");
    let done = finish(child);
    assert_eq!(done.code, 0, "{done:?}");
    assert!(done.stderr.contains("rio: all writes are durable"), "{done:?}");

    // It was closed, so no lease delays the next one, and there is nothing to recover.
    let socket = folder.join("nbd");
    let nbd = format!("unix:{}", socket.display());
    let (child, printed) = attach(folder, &address, &members, &["--streams", "2", "--nbd", &nbd]);
    assert_eq!(printed["nbd"], format!("nbd+unix:///outer?socket={}", socket.display()));
    let mut greeting = [0; 8];
    UnixStream::connect(&socket).unwrap().read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting, b"NBDMAGIC");
    inner("verify", &["a"]).ok();
    let taken = ["--listen", &members[0]];
    signal(&child, "-INT");
    assert_eq!(finish(child).code, 0);
    let args = [&second[..], &taken].concat();
    rio_in(folder, &args).failed(7, &[&members[0]]);
    let args = [&second[..], &["--streams", "4"]].concat();
    rio_in(folder, &args).failed(4, &["4 streams", "has 3"]);
    for (child, _) in served {
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
    }
}

/// The blocks that the host writes over and over.
const BLOCKS: u64 = 1200;

/// For each block, the newest version that the host knows to be durable.
type Confirmed = Arc<Mutex<BTreeMap<u64, u64>>>;

/// Writes blocks of volume `inner`, with versions from `first` on, until its drive is lost. Every fourth
/// group is durable.
fn write(inner: &Volume, first: u64, confirmed: &Confirmed) -> Box<dyn Error + Send + Sync> {
    let mut pending = VecDeque::new();
    let mut stream = match inner.stream(0, &StreamOptions::default()) {
        Ok(stream) => stream,
        Err(error) => return error.into(),
    };
    for version in first.. {
        // Consecutive versions are far apart, so that all streams and members are written.
        let lba = version * 389 % BLOCKS;
        let mut buf = stream.buf(4096).unwrap();
        fill(&mut buf, lba, version);
        let group = stream.group().write(lba, buf, Place::InPlace);
        let submitted = match version % 4 {
            0 => group.submit_durable_or_wait(None),
            _ => group.submit_or_wait(None),
        };
        match submitted {
            Ok(seq) => pending.push_back((seq, lba, version)),
            Err(error) => return error.kind.into(),
        }
        while pending.len() >= 32
            && let Some((seq, lba, version)) = pending.pop_front()
        {
            if let Err(error) = stream.wait(Until::Durable(seq), None) {
                return error.into();
            }
            confirmed.lock().unwrap().insert(lba, version);
        }
    }
    unreachable!("the versions do not end")
}

fn fill(block: &mut [u8], lba: u64, version: u64) {
    block.fill((lba as u8).wrapping_mul(31) ^ version as u8);
    block[..8].copy_from_slice(&lba.to_le_bytes());
    block[8..16].copy_from_slice(&version.to_le_bytes());
}

/// The newest version that was confirmed.
fn newest(confirmed: &Confirmed) -> u64 {
    confirmed.lock().unwrap().values().max().copied().unwrap_or(0)
}

fn wait_for_progress<T>(confirmed: &Confirmed, writer: &JoinHandle<T>) {
    let (before, begun) = (newest(confirmed), Instant::now());
    while newest(confirmed) < before + 300 {
        assert!(!writer.is_finished(), "the writer has failed");
        assert!(begun.elapsed() < LIMIT, "nothing more is confirmed than version {before}");
        thread::sleep(Duration::from_millis(5));
    }
}

fn kill(child: &mut Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn kill_9_of_the_process_and_of_targets_loses_nothing_that_was_confirmed() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut targets, members): (Vec<Child>, Vec<String>) =
        (0..2).map(|number| member(folder, number, None)).unzip();
    create_outer(folder, &members);
    let address = free_address();
    let (mut attached, _) = attach(folder, &address, &members, &[]);
    let inner: [MemberAddr; 1] = [format!("{address},nqn={NQN}").parse().unwrap()];
    let connect =
        || ConnectOptions { timeout: Duration::from_secs(60), ..ConnectOptions::default() };
    let options = CreateOptions {
        engine: Some(EngineKind::Sync),
        streams: 1,
        connect: connect(),
        ..CreateOptions::default()
    };
    Volume::create("inner", &inner, &options).unwrap();
    let options = OpenOptions { connect: connect(), take_over: true, ..OpenOptions::default() };
    let confirmed = Confirmed::default();
    for round in 0..4 {
        let (volume, _) = Volume::open("inner", &inner, &options).unwrap();
        let writer = {
            let confirmed = Arc::clone(&confirmed);
            thread::spawn(move || write(&volume, 1 + round * 10_000_000, &confirmed).to_string())
        };
        wait_for_progress(&confirmed, &writer);
        // A target dies and comes back: a delay for the host (promise P7).
        let number = round as usize % 2;
        kill(&mut targets[number]);
        targets[number] = member_again(folder, number, &members);
        wait_for_progress(&confirmed, &writer);
        // The process dies, and in every other round all targets, too.
        kill(&mut attached);
        if round % 2 == 1 {
            targets.iter_mut().for_each(kill);
            targets = (0..2).map(|number| member_again(folder, number, &members)).collect();
        }
        attached = attach(folder, &address, &members, &["--take-over"]).0;
        let why = writer.join().unwrap();
        assert!(why.contains("inner"), "the host has lost its drive: {why}");

        let (volume, _) = Volume::open("inner", &inner, &options).unwrap();
        let reader = volume.reader(&ReaderOptions::default());
        let confirmed = confirmed.lock().unwrap();
        assert!(confirmed.len() > 100, "{} blocks", confirmed.len());
        for (&lba, &version) in confirmed.iter() {
            let (mut found, mut whole) = (vec![0; 4096], vec![0; 4096]);
            reader.read(lba, &mut found, Some(LIMIT)).unwrap();
            let read = u64::from_le_bytes(found[8..16].try_into().unwrap());
            assert!(read >= version, "round {round}: block {lba} has {read}, not {version}");
            fill(&mut whole, lba, read);
            assert!(found == whole, "block {lba} is whole");
        }
    }
    for child in std::iter::once(attached).chain(targets) {
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
    }
}

/// The error number of a write of one block over NBD.
fn nbd_write(socket: &mut UnixStream, flags: u16) -> u32 {
    let mut request = [0; 28 + 4096];
    request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    request[4..6].copy_from_slice(&flags.to_be_bytes());
    request[7] = 1;
    request[24..28].copy_from_slice(&4096_u32.to_be_bytes());
    socket.write_all(&request).unwrap();
    let mut reply = [0; 16];
    socket.read_exact(&mut reply).unwrap();
    u32::from_be_bytes(reply[4..8].try_into().unwrap())
}

/// Promise P6: the host gets errors, and the program does not claim that all is durable.
#[test]
fn a_failed_device_answers_with_errors_and_ends_with_its_code() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let (mut target, address) = member(folder, 0, None);
    create_outer(folder, std::slice::from_ref(&address));
    let path = folder.join("nbd");
    let nbd = format!("unix:{}", path.display());
    let args = ["volume", "attach", "outer", "-m", &address, "--nbd", &nbd, "-o", "json"];
    let args = [&args[..], &["--loss-timeout", "1"]].concat();
    let (child, printed) = served(start_in(folder, &args));
    assert_eq!(keys(&printed), "bytes nbd schema volume", "NBD alone");
    let mut socket = UnixStream::connect(&path).unwrap();
    // The flags of the client, and `NBD_OPT_EXPORT_NAME` without a name.
    let hello = [&3_u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat();
    socket.write_all(&hello).unwrap();
    socket.read_exact(&mut [0; 18 + 10]).unwrap();
    assert_eq!(nbd_write(&mut socket, 1), 0);
    kill(&mut target);
    assert_eq!((nbd_write(&mut socket, 1), nbd_write(&mut socket, 0)), (5, 5), "EIO");
    signal(&child, "-TERM");
    let done = finish(child);
    done.failed(6, &["may be lost", "recovered when it is opened again"]);
    assert!(done.stderr.contains("the device has failed"), "{done:?}");
    assert!(!done.stderr.contains("rio: all writes are durable"), "{done:?}");

    // Another owner of the volume is waited for; a signal ends that at once.
    let (target, _) = member(folder, 0, Some(&address));
    let owner = ["volume", "attach", "outer", "-m", &address, "--nbd", &nbd, "-o", "json"];
    let (owner, _) = served(start_in(folder, &[&owner[..], &["--take-over"]].concat()));
    let waits = ["volume", "attach", "outer", "-m", &address, "--nbd", "unix:w", "--wait", "86400"];
    let waiting = start_in(folder, &waits);
    thread::sleep(Duration::from_millis(300));
    signal(&waiting, "-TERM");
    assert_ne!(finish(waiting).code, 0);
    for child in [owner, target] {
        signal(&child, "-TERM");
        assert_eq!(finish(child).code, 0);
    }
}
