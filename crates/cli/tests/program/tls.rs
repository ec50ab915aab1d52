//! Hosts and targets with TLS 1.3 and pre-shared keys.

use std::{
    fs,
    fs::File,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Child,
};

use riopipe::TlsPsk;
use riopipe_testkit::peer::{Digests, icreq};

use crate::{
    serve::{serve, served, signal},
    signals::wait_until_written,
    site::{Done, content, finish, program, rio_in, start_in},
};

const NQN: &str = "nqn.2026-11.com.example:drives";
const HOST: &str = "nqn.2026-11.com.example:host";
const OTHER: &str = "nqn.2026-11.com.example:other";

/// Files with keys, which only their owner may read.
struct Keys {
    folder: tempfile::TempDir,
    /// The part of each text that is the key, as no line of any program may show it.
    texts: Vec<String>,
}

impl Keys {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut keys = Self { folder, texts: Vec::new() };
        for (name, key) in
            [("host", &[0x37; 48][..]), ("other", &[0x91; 32]), ("wrong", &[0xd4; 48])]
        {
            let text = TlsPsk::new(key, None).unwrap().to_text().to_string();
            fs::write(keys.folder().join(name), format!("{text}\n")).unwrap();
            keys.set_mode(name, 0o600);
            keys.texts.push(text.split(':').nth(2).unwrap()[..40].to_owned());
        }
        keys
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn set_mode(&self, name: &str, mode: u32) {
        let path = self.folder().join(name);
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A target that both hosts may use with their keys.
    fn serve(&self, words: &[&str]) -> (Child, String) {
        let hosts = [format!("{HOST}=host"), format!("{OTHER}=other")];
        let tls = ["--tls-host", &hosts[0], "--tls-host", &hosts[1], "-n", NQN, "-vv"];
        let (child, printed) = serve(self.folder(), &[&tls[..], words].concat());
        (child, printed["addresses"][0].as_str().unwrap().to_owned())
    }

    /// `rio volume WORDS…` as this host, with the key in this file.
    fn volume(&self, words: &[&str], address: &str, host: &str, key: Option<&str>) -> Done {
        let member = format!("{address},nqn={NQN}");
        let mut args = [&["volume"], words, &["-m", &member, "-q", host, "-o", "json"]].concat();
        args.extend(key.into_iter().flat_map(|key| ["--tls-psk", key]));
        let done = rio_in(self.folder(), &args);
        self.assert_not_in(&done);
        done
    }

    fn assert_not_in(&self, done: &Done) {
        let text = format!("{} {}", done.stdout, done.stderr);
        for key in &self.texts {
            assert!(!text.contains(key), "a key is shown: {text}");
        }
    }

    /// Ends a target; returns its log.
    fn log_of(&self, child: Child) -> String {
        signal(&child, "-TERM");
        let done = finish(child);
        self.assert_not_in(&done);
        done.stderr
    }
}

const MEMORY: [&str; 4] = ["--drive", "mem:16M", "--log", "mem:2M"];

#[test]
fn only_a_host_with_its_own_key_gets_in_and_nothing_shows_a_key() {
    let keys = Keys::new();
    let (child, address) = keys.serve(&MEMORY);
    let create = |host: &str, key: Option<&str>| keys.volume(&["create", "v"], &address, host, key);

    create(HOST, Some("wrong")).failed(3, &["another key of TLS", "compare"]);
    create("nqn.2026-11.com.example:stranger", Some("host")).failed(3, &["knows no key"]);
    create(HOST, Some("nowhere")).failed(2, &["nowhere"]);
    create(HOST, None).failed(3, &["--tls-psk"]);
    // A key proves one name.
    create(OTHER, Some("host")).failed(3, &["knows no key"]);
    create(HOST, Some("host")).ok();
    fs::write(keys.folder().join("a"), content(3_000_000)).unwrap();
    for words in [&["write", "v", "a"][..], &["verify", "v", "a"]] {
        keys.volume(words, &address, HOST, Some("host")).ok();
    }
    keys.volume(&["verify", "v", "a"], &address, OTHER, Some("other")).ok();
    // Without the name of the subsystem, discovery finds it first, with TLS, too.
    let show = ["volume", "show", "-m", &address, "-q", HOST, "-o", "json"];
    rio_in(keys.folder(), &[&show[..], &["--tls-psk", "host"]].concat()).ok();
    let discovered = program()
        .args(["discover", "-a", &address, "-q", HOST, "-o", "json"])
        .env("RIO_TLS_PSK", keys.folder().join("host"))
        .output()
        .unwrap();
    let discovered = Done::of(discovered);
    discovered.ok();
    assert_eq!(discovered.json()["records"][0]["sectype"], "tls13");
    assert_eq!(discovered.json()["records"][0]["treq"], "required");

    let log = keys.log_of(child);
    let refused = |why: &str| {
        log.lines().filter(|line| line.contains("TLS refused")).any(|line| line.contains(why))
    };
    for why in ["does not have the key", "no key of TLS is known", "without TLS"] {
        assert!(refused(why), "{why}: {log}");
    }
}

/// A host with TLS at a port that has none, and a host without TLS at a port that has it.
#[test]
fn a_peer_that_does_the_other_thing_is_refused_with_a_reason() {
    let keys = Keys::new();
    let (child, printed) = serve(keys.folder(), &[&MEMORY[..], &["-n", NQN]].concat());
    let address = printed["addresses"][0].as_str().unwrap();
    let done = keys.volume(&["create", "v"], address, HOST, Some("host"));
    done.failed(3, &["does not speak TLS", "check the port"]);
    let log = keys.log_of(child);
    assert!(log.contains("this port has no TLS"), "{log}");

    // On a port that allows both, a host with a key must use it, because its name proves nothing.
    let (child, address) = keys.serve(
        &[&MEMORY[..], &["--tls", "allowed", "--allow-host", "nqn.2026-11.com.example:plain"]]
            .concat(),
    );
    let done = keys.volume(&["create", "v"], &address, HOST, None);
    done.failed(3, &[HOST]);
    keys.volume(&["create", "v"], &address, "nqn.2026-11.com.example:plain", None).ok();
    keys.volume(&["show", "v"], &address, HOST, Some("host")).ok();
    let log = keys.log_of(child);
    assert!(log.contains("has connected without TLS"), "{log}");
}

#[test]
fn a_file_that_others_may_read_is_refused() {
    let keys = Keys::new();
    keys.set_mode("host", 0o644);
    let host = format!("{HOST}=host");
    let serve = ["target", "serve", "-s", "0", "--drive", "mem:16M", "-o", "json", "--tls-host"];
    rio_in(keys.folder(), &[&serve[..], &[&host]].concat()).failed(2, &["0644", "chmod 600"]);
    keys.volume(&["show"], "127.0.0.1:1", HOST, Some("host")).failed(2, &["0644", "chmod 600"]);
    // A key in the configuration makes the configuration secret, and one among the arguments is refused.
    let text = fs::read_to_string(keys.folder().join("host")).unwrap();
    let config = format!(
        "[tls.hosts]\n\"{HOST}\" = \"{}\"\n[[namespaces]]\ndrive = \"mem:16M\"\n",
        text.trim()
    );
    fs::write(keys.folder().join("target.toml"), config).unwrap();
    let check = ["target", "check", "-c", "target.toml", "-o", "json"];
    rio_in(keys.folder(), &check).failed(2, &["target.toml", "chmod 600"]);
    keys.set_mode("target.toml", 0o600);
    let done = rio_in(keys.folder(), &check);
    done.ok();
    keys.assert_not_in(&done);
    let inline = format!("{HOST}={}", text.trim());
    let done = rio_in(keys.folder(), &[&serve[..], &[&inline]].concat());
    done.failed(2, &["among the arguments"]);
    keys.assert_not_in(&done);
}

/// P7: the target dies under a copy, and another one takes its place. The copy connects with TLS again, and
/// sends again what was not confirmed.
#[test]
fn p7_a_copy_outlives_the_death_of_its_target() {
    let keys = Keys::new();
    let drives = ["--drive", "file:d,size=1G", "--log", "file:l,size=2M"];
    let (child, address) = keys.serve(&drives);
    keys.volume(&["create", "v"], &address, HOST, Some("host")).ok();
    fs::write(keys.folder().join("a"), content(20 << 20)).unwrap();
    File::options().write(true).open(keys.folder().join("a")).unwrap().set_len(700 << 20).unwrap();
    let member = format!("{address},nqn={NQN}");
    let copy = ["volume", "write", "v", "a", "-m", &member, "-q", HOST, "--tls-psk", "host"];
    let limits =
        ["--loss-timeout", "36000", "--timeout", "36000", "--io-timeout", "36000", "-o", "json"];
    let writer = start_in(keys.folder(), &[&copy[..], &limits].concat());
    wait_until_written(keys.folder());
    signal(&child, "-KILL");
    finish(child);
    let port = address.rsplit(':').next().unwrap();
    let host = format!("{HOST}=host");
    let again = ["target", "serve", "-s", port, "-o", "json", "-n", NQN, "--tls-host", &host];
    let (child, _) = served(start_in(keys.folder(), &[&again[..], &drives].concat()));
    let done = finish(writer);
    keys.assert_not_in(&done);
    done.ok();
    keys.volume(&["verify", "v", "a"], &address, HOST, Some("host")).ok();
    keys.log_of(child);
}

/// T28: a handshake that goes no further counts as a connection that is not admitted, with the same limits.
#[test]
fn t28_half_open_handshakes_give_way_to_a_host_with_its_key() {
    let keys = Keys::new();
    let config = format!(
        "pending_connections_per_address = 8\n[tls.hosts]\n\"{HOST}\" = \"{}\"\n",
        keys.folder().join("host").display()
    );
    fs::write(keys.folder().join("target.toml"), config).unwrap();
    let words = [&MEMORY[..], &["-c", "target.toml", "-n", NQN]].concat();
    let (child, printed) = serve(keys.folder(), &words);
    let address = printed["addresses"][0].as_str().unwrap();
    // In turn nothing, the start of a record, and a ClientHello that is no valid one.
    let half_open = |number: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        let begin: &[u8] = match number % 3 {
            0 => &[],
            1 => &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3],
            _ => &[22],
        };
        stream.write_all(begin).unwrap();
        stream
    };
    let streams: Vec<TcpStream> = (0..60).map(half_open).collect();
    keys.volume(&["create", "v"], address, HOST, Some("host")).ok();
    // Those that have given way are closed, so this does not wait for a time limit.
    for mut stream in &streams[..40] {
        assert!(matches!(stream.read(&mut [0; 100]), Ok(0) | Err(_)));
    }
    let log = keys.log_of(child);
    assert!(log.contains("gave way to another one"), "{log}");
}

/// A host that speaks NVMe/TCP at once learns that this port is for TLS: its connection ends.
#[test]
fn a_plain_icreq_on_a_port_with_tls_gets_no_answer() {
    let keys = Keys::new();
    let (child, address) = keys.serve(&MEMORY);
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all(&icreq(Digests::default(), 0)).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty(), "{answer:?}");
    let log = keys.log_of(child);
    assert!(log.contains("speaks NVMe/TCP without TLS"), "{log}");
}
