//! Hosts and targets that prove their identity with secrets.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use riopipe::DhchapSecret;
use riopipe_target::{Config, SecretSource, Target};

use crate::{
    serve::{serve, served, signal},
    site::{Done, content, finish, keys, program, rio_in, start_in},
};

const NQN: &str = "nqn.2026-11.com.example:drives";
const HOST: &str = "nqn.2026-11.com.example:host";
const STRANGER: &str = "nqn.2026-11.com.example:stranger";

/// Files with secrets, which only their owner may read.
struct Secrets {
    folder: tempfile::TempDir,
    /// The texts, as no line of any program may show them.
    texts: Vec<String>,
}

impl Secrets {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut secrets = Self { folder, texts: Vec::new() };
        for (name, byte) in [("host", 0x37), ("target", 0x91), ("wrong", 0xd4)] {
            let text = DhchapSecret::new(&[byte; 32], None).unwrap().to_text().to_string();
            let path = secrets.path(name);
            fs::write(&path, format!("{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            // The part that stands for the secret itself.
            secrets.texts.push(text.split(':').nth(2).unwrap()[..40].to_owned());
        }
        secrets
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn assert_not_in(&self, text: &str) {
        for secret in &self.texts {
            assert!(!text.contains(secret), "a secret is shown: {text}");
        }
    }

    /// `rio volume WORDS…` as this host, with secrets from these files.
    fn volume(&self, words: &[&str], member: &str, host: &str, files: &[&str]) -> Done {
        let mut args = [&["volume"], words, &["-m", member, "-q", host, "-o", "json"]].concat();
        for (option, file) in ["--dhchap-secret", "--dhchap-ctrl-secret"].iter().zip(files) {
            args.extend([option, file]);
        }
        let done = rio_in(self.folder(), &args);
        self.assert_not_in(&format!("{} {}", done.stdout, done.stderr));
        done
    }
}

#[test]
fn only_a_host_with_the_secret_gets_in_and_nothing_shows_a_secret() {
    let secrets = Secrets::new();
    let host = format!("{HOST}=host");
    let words = ["--drive", "mem:16M", "--log", "mem:2M", "-n", NQN, "-vv"];
    let guarded = ["--dhchap-host", &host, "--dhchap-ctrl-secret", "target"];
    let (child, printed) = serve(secrets.folder(), &[&words[..], &guarded].concat());
    let address = printed["addresses"][0].as_str().unwrap();
    let member = format!("{address},nqn={NQN}");
    let create =
        |host: &str, files: &[&str]| secrets.volume(&["create", "v"], &member, host, files);

    create(HOST, &[]).failed(3, &["to authenticate", HOST, "--dhchap-secret"]);
    create(HOST, &["wrong"]).failed(3, &["did not authenticate", "refused"]);
    create(HOST, &["host", "wrong"]).failed(3, &["could not prove its identity"]);
    create(STRANGER, &["host"]).failed(3, &[STRANGER, "allowed hosts"]);
    create(HOST, &["nowhere"]).failed(2, &["nowhere"]);
    create(HOST, &["host", "target"]).ok();
    fs::write(secrets.path("a"), content(500_000)).unwrap();
    for words in [&["write", "v", "a"][..], &["verify", "v", "a"]] {
        // The target need not prove its identity to a host that does not ask for it.
        secrets.volume(words, &member, HOST, &["host"]).ok();
        secrets.volume(words, &member, HOST, &["host", "target"]).ok();
    }
    // Without the name of the subsystem, discovery finds it first.
    secrets.volume(&["show"], address, HOST, &["host", "target"]).ok();
    let environment = program()
        .args(["volume", "show", "-m", &member, "-q", HOST, "-o", "json"])
        .env("RIO_DHCHAP_SECRET", secrets.path("host"))
        .env("RIO_DHCHAP_CTRL_SECRET", secrets.path("target"))
        .output()
        .unwrap();
    Done::of(environment).ok();

    signal(&child, "-TERM");
    let done = finish(child);
    secrets.assert_not_in(&format!("{} {}", done.stdout, done.stderr));
    let failed = |why: &str| {
        let lines = done.stderr.lines().filter(|line| line.contains("authentication failed"));
        lines.filter(|line| line.contains(why) && line.contains(HOST)).count()
    };
    assert!(failed("another secret") >= 1, "{}", done.stderr);
    assert!(failed("the host has given up") >= 1, "{}", done.stderr);
}

/// The exported volume of `rio volume attach` has the access rules and the metrics of a target.
#[test]
fn an_attached_volume_is_for_hosts_with_the_secret_and_has_metrics() {
    let secrets = Secrets::new();
    let words = ["--drive", "mem:64M", "--log", "mem:2M", "-n", "nqn.2026-11.com.example:member"];
    let (target, printed) = serve(secrets.folder(), &words);
    let address = printed["addresses"][0].as_str().unwrap();
    let of_volume = ["outer", "-m", address, "-o", "json"];
    rio_in(secrets.folder(), &[&["volume", "create"], &of_volume[..]].concat()).ok();
    let attach = |words: &[&str]| {
        let all = [&["volume", "attach"], &of_volume[..], words].concat();
        all.into_iter().map(str::to_owned).collect::<Vec<String>>()
    };
    let host = format!("{HOST}=host");

    let run = |words: &[&str]| {
        rio_in(secrets.folder(), &attach(words).iter().map(String::as_str).collect::<Vec<_>>())
    };
    let inline = format!("{HOST}=DHHC-1:00:{}:", secrets.texts[0]);
    let shown = run(&["--dhchap-host", &inline]);
    shown.failed(2, &["a secret is among the arguments"]);
    let nbd = ["--nbd", "unix:nbd", "--metrics", "127.0.0.1:0"];
    run(&nbd).failed(2, &["--metrics", "--listen"]);
    let nbd = ["--nbd", "unix:nbd", "--dhchap-host", &host];
    run(&nbd).failed(2, &["--dhchap-host", "--listen"]);

    let guarded = ["--dhchap-host", &host, "--export-ctrl-secret", "target", "-vv"];
    let listen = ["--listen", "127.0.0.1:0", "--nqn", NQN, "--metrics", "127.0.0.1:0"];
    let words = attach(&[&listen[..], &guarded].concat());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let (child, printed) = served(start_in(secrets.folder(), &words));
    assert_eq!(keys(&printed), "bytes metrics nvme schema volume");
    let member = format!("{},nqn={NQN}", printed["nvme"]["address"].as_str().unwrap());
    let create =
        |host: &str, files: &[&str]| secrets.volume(&["create", "v"], &member, host, files);
    create(HOST, &[]).failed(3, &["to authenticate", HOST]);
    create(HOST, &["wrong"]).failed(3, &["did not authenticate"]);
    create(STRANGER, &["host"]).failed(3, &[STRANGER, "allowed hosts"]);
    create(HOST, &["host", "target"]).ok();
    let metrics = printed["metrics"].as_str().unwrap();
    let stat = rio_in(secrets.folder(), &["target", "stat", metrics, "-o", "json"]).ok();
    assert_eq!(stat["subnqn"], NQN, "{stat}");
    signal(&child, "-TERM");
    let done = finish(child);
    assert_eq!(done.code, 0, "{done:?}");
    secrets.assert_not_in(&format!("{} {}", done.stdout, done.stderr));
    signal(&target, "-TERM");
    assert_eq!(finish(target).code, 0);
}

#[test]
fn every_diffie_hellman_group_works_between_the_two_programs() {
    let secrets = Secrets::new();
    fs::write(secrets.path("a"), content(50_000)).unwrap();
    for group in ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"] {
        let mut config = Config::on_loopback(&["mem:16M"]);
        config.reactors = Some(2);
        config.subnqn = Some(NQN.to_owned());
        config.dhchap.dhgroups = vec![group.to_owned()];
        config.dhchap.hashes = vec!["sha384".to_owned()];
        let file = |name: &str| SecretSource::file(secrets.path(name).to_str().unwrap());
        config.dhchap.hosts.insert(HOST.to_owned(), file("host"));
        config.dhchap.controller = Some(file("target"));
        let target = Target::start(&config).unwrap();
        let member = format!("{},nqn={NQN}", target.addresses()[0]);
        let engine = ["create", "v", "--engine", "sync", "--streams", "2"];
        secrets.volume(&engine, &member, HOST, &["host", "target"]).ok();
        secrets.volume(&["write", "v", "a"], &member, HOST, &["host", "target"]).ok();
        secrets.volume(&["verify", "v", "a"], &member, HOST, &["host", "target"]).ok();
        target.stop().unwrap();
    }
}

#[test]
fn a_file_that_others_may_read_is_refused() {
    let secrets = Secrets::new();
    fs::set_permissions(secrets.path("host"), fs::Permissions::from_mode(0o644)).unwrap();
    let host = format!("{HOST}=host");
    let serve = ["target", "serve", "-s", "0", "--drive", "mem:16M", "-o", "json"];
    let served = rio_in(secrets.folder(), &[&serve[..], &["--dhchap-host", &host]].concat());
    served.failed(2, &["0644", "chmod 600"]);
    secrets.volume(&["show"], "127.0.0.1:1", HOST, &["host"]).failed(2, &["0644", "chmod 600"]);
    // A secret in the configuration makes the configuration secret.
    let text = fs::read_to_string(secrets.path("host")).unwrap();
    let config = format!(
        "[dhchap.hosts]\n\"{HOST}\" = \"{}\"\n[[namespaces]]\ndrive = \"mem:16M\"\n",
        text.trim()
    );
    fs::write(secrets.path("target.toml"), config).unwrap();
    let check = ["target", "check", "-c", "target.toml", "-o", "json"];
    let done = rio_in(secrets.folder(), &check);
    done.failed(2, &["target.toml", "chmod 600"]);
    secrets.assert_not_in(&format!("{} {}", done.stdout, done.stderr));
    fs::set_permissions(secrets.path("target.toml"), fs::Permissions::from_mode(0o600)).unwrap();
    let done = rio_in(secrets.folder(), &check);
    done.ok();
    secrets.assert_not_in(&format!("{} {}", done.stdout, done.stderr));
    // Nor among the arguments, where other users see it.
    let inline = format!("{HOST}={}", text.trim());
    let served = rio_in(secrets.folder(), &[&serve[..], &["--dhchap-host", &inline]].concat());
    served.failed(2, &["among the arguments"]);
    secrets.assert_not_in(&served.stderr);
}
