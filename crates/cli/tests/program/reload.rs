//! `rio target reload` and SIGHUP: namespaces and hosts come and go while a target serves.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{
    serve::{served, signal},
    signals::wait_until_written,
    site::{Done, LIMIT, content, finish, keys, program, rio_in, start_in},
};

pub(crate) const HOST: &str = "nqn.2026-11.com.example:host";
pub(crate) const OTHER: &str = "nqn.2026-11.com.example:other";

/// A target with a configuration file that changes.
pub(crate) struct Scene {
    pub(crate) folder: TempDir,
    pub(crate) target: Option<Child>,
    address: String,
}

/// A configuration with these namespaces, each a file `d` and its id, and these further lines.
fn write_config(folder: &Path, nsids: &[u32], more: &str) {
    let mut text = format!(
        "listen = [\"127.0.0.1:0\"]\nsubnqn = \"nqn.2026-11.com.example:reload\"\n\
         log = \"file:l,size=2M\"\ncreate = true\ncontrol = \"control\"\nreactors = 2\n{more}\n"
    );
    for nsid in nsids {
        text += &format!("[[namespaces]]\nnsid = {nsid}\ndrive = \"file:d{nsid},size=64M\"\n");
    }
    fs::write(folder.join("target.toml"), text).unwrap();
}

impl Scene {
    pub(crate) fn new(nsids: &[u32], more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_config(folder.path(), nsids, more);
        let words = ["target", "serve", "-c", "target.toml", "-o", "json"];
        let log = fs::File::create(folder.path().join("messages")).unwrap();
        let mut command = program();
        command.args(words).current_dir(folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let (target, printed) = served(command.spawn().unwrap());
        assert_eq!(printed["control"], "control");
        let address = printed["addresses"][0].as_str().unwrap().to_owned();
        fs::write(folder.path().join("a"), content(300_000)).unwrap();
        Self { folder, target: Some(target), address }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn config(&self, nsids: &[u32], more: &str) {
        write_config(self.folder.path(), nsids, more);
    }

    fn reload(&self, words: &[&str]) -> Done {
        let words = [&["target", "reload", "--control", "control", "-o", "json"], words].concat();
        rio_in(self.folder.path(), &words)
    }

    pub(crate) fn start(&self, verb: &str, nsid: u32, host: &str, words: &[&str]) -> Child {
        let member = format!("{},ns={nsid}", self.address);
        let last = ["-m", &member, "-q", host, "-o", "json", "--timeout", "60"];
        start_in(self.folder.path(), &[&["volume", verb], words, &last].concat())
    }

    pub(crate) fn volume(&self, verb: &str, nsid: u32, words: &[&str]) -> Done {
        finish(self.start(verb, nsid, HOST, words))
    }

    /// A process that has volume `v` of namespace 2 open as [`HOST`], until its pipe is dropped.
    pub(crate) fn start_writer(&self) -> (Child, ChildStdin) {
        let member = format!("{},ns=2", self.address);
        let words = ["volume", "write", "v", "-", "--name", "x", "-o", "json", "-m", &member];
        let mut command = program();
        command.args(words).args(["-q", HOST, "--loss-timeout", "1"]);
        command.current_dir(self.folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut writer = command.spawn().unwrap();
        let mut pipe = writer.stdin.take().unwrap();
        pipe.write_all(&content(4 << 20)).unwrap();
        wait_until_written(self.folder.path());
        (writer, pipe)
    }

    pub(crate) fn messages(&self) -> String {
        fs::read_to_string(self.path("messages")).unwrap()
    }

    /// Waits until the target has logged this.
    pub(crate) fn wait_for_message(&self, words: &str) {
        let begun = Instant::now();
        while !self.messages().contains(words) {
            assert!(begun.elapsed() < LIMIT, "no {words:?} in {}", self.messages());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn stop(mut self) {
        let target = self.target.take().unwrap();
        signal(&target, "-TERM");
        assert_eq!(finish(target).code, 0);
        assert!(!self.path("control").exists(), "an orderly end removes the socket");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Some(mut target) = self.target.take() {
            let _ = target.kill();
            let _ = target.wait();
        }
    }
}

fn nsids(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|ns| ns["nsid"].as_u64().unwrap()).collect()
}

#[test]
fn a_namespace_comes_goes_and_comes_back_with_its_volume() {
    let scene = Scene::new(&[1], "");
    let same = scene.reload(&[]).ok();
    assert_eq!(
        keys(&same),
        "added_addresses added_ana added_hosts added_namespaces closing created dry_run forced \
         removed_addresses removed_ana removed_hosts removed_namespaces schema"
    );
    assert_eq!(
        (&same["schema"], nsids(&same["added_namespaces"])),
        (&"rio-target-reload/1".into(), vec![])
    );

    scene.config(&[1, 2], "");
    let dry = scene.reload(&["--dry-run"]).ok();
    assert_eq!((nsids(&dry["added_namespaces"]), &dry["created"][0]), (vec![2], &"d2".into()));
    assert!(!scene.path("d2").exists(), "a dry run changes nothing");
    scene.volume("show", 2, &["v"]).failed(4, &[]);
    let done = scene.reload(&[]).ok();
    assert_eq!((&done["dry_run"], nsids(&done["added_namespaces"])), (&false.into(), vec![2]));
    scene.volume("create", 1, &["w"]).ok();
    scene.volume("create", 2, &["v"]).ok();
    scene.volume("write", 2, &["v", "a"]).ok();

    // The drive is free when the reload is done: another process may have it.
    scene.config(&[1], "");
    let done = scene.reload(&[]).ok();
    assert_eq!((nsids(&done["removed_namespaces"]), nsids(&done["closing"])), (vec![2], vec![]));
    rio_in(scene.folder.path(), &["target", "identity", "file:d2", "-o", "json"]).ok();
    assert_eq!(scene.volume("show", 1, &["w"]).ok()["state"], "free");
    scene.volume("verify", 2, &["v", "a"]).failed(4, &[]);

    scene.config(&[1, 2], "");
    scene.reload(&[]).ok();
    scene.volume("verify", 2, &["v", "a"]).ok();
    for line in ["configuration changed: - namespace 2", "configuration changed: + namespace 2"] {
        assert!(scene.messages().contains(line), "{}", scene.messages());
    }
    scene.stop();
}

#[test]
fn an_open_volume_keeps_its_namespace_unless_it_is_forced() {
    let scene = Scene::new(&[1, 2], "");
    scene.volume("create", 2, &["v"]).ok();
    let (writer, pipe) = scene.start_writer();

    scene.config(&[1], "");
    for words in [&["--dry-run"][..], &[]] {
        let refused = scene.reload(words);
        let text = refused.failed(4, &["namespace 2", HOST, "has open", "--force"]);
        assert!(text.contains("serves as before"), "{text}");
    }
    assert_eq!(scene.volume("show", 2, &["v"]).ok()["state"], "owned", "nothing has changed");
    let forced = scene.reload(&["--force"]).ok();
    assert_eq!(nsids(&forced["removed_namespaces"]), [2]);
    assert!(forced["forced"][0].as_str().unwrap().contains("has open"), "{forced}");
    drop(pipe);
    finish(writer).failed(6, &[]);
    // The other namespace is served as before, and the drive comes back with its volume.
    scene.volume("create", 1, &["w"]).ok();
    scene.config(&[1, 2], "");
    scene.reload(&[]).ok();
    let state = scene.volume("show", 2, &["v"]).ok()["state"].clone();
    assert!(["unrecovered", "owned"].contains(&state.as_str().unwrap()), "{state}");
    scene.volume("recover", 2, &["v", "--take-over", "--acknowledge"]).ok();
    scene.volume("write", 2, &["v", "a"]).ok();
    scene.stop();
}

#[test]
fn what_cannot_change_refuses_the_whole() {
    let scene = Scene::new(&[1], "");
    scene.config(&[1, 2], "spin_us = 7\nmodel = \"Other\"");
    for words in [&["--dry-run"][..], &[], &["--force"]] {
        let text = scene.reload(words).failed(2, &["model", "\"Other\"", "spin_us", "restart"]);
        assert!(text.contains("serves as before"), "{text}");
    }
    assert!(!scene.path("d2").exists());
    // Neither does a mistake, nor a drive that can't be opened, nor one that is another's.
    fs::write(scene.path("target.toml"), "listen = [\n").unwrap();
    scene.reload(&[]).failed(2, &["target.toml"]);
    scene.config(&[1], "[[namespaces]]\nnsid = 3\ndrive = \"file:nowhere/d,size=1M\"");
    scene.reload(&[]).failed(7, &["namespace 3"]);
    scene.config(&[1], "[[namespaces]]\nnsid = 3\ndrive = \"file:d1\"");
    scene.reload(&[]).failed(2, &["same file"]);
    fs::remove_file(scene.path("target.toml")).unwrap();
    scene.reload(&[]).failed(1, &["target.toml"]);
    // After all that, the right one is taken.
    scene.config(&[1, 3], "");
    assert_eq!(nsids(&scene.reload(&[]).ok()["added_namespaces"]), [3]);
    scene.stop();
}

/// The records that discovery at an address has: address, port, port id.
fn records(scene: &Scene, address: &str) -> Vec<(String, String, u64)> {
    let (host, port) = address.rsplit_once(':').unwrap();
    let words = ["discover", "-a", host, "-s", port, "-o", "json"];
    let found = rio_in(scene.folder.path(), &words).ok();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let record = |it: &Value| (text(&it["traddr"]), text(&it["trsvcid"]), it["portid"].as_u64());
    let all = found["records"].as_array().unwrap().iter().map(record);
    all.map(|(address, port, id)| (address, port, id.unwrap())).collect()
}

#[test]
fn addresses_come_and_go() {
    let mut scene = Scene::new(&[2], "");
    let listen = |scene: &Scene, nsids: &[u32], addresses: &[&str], more: &str| {
        scene.config(nsids, more);
        let text = fs::read_to_string(scene.path("target.toml")).unwrap();
        let listen = format!("listen = {addresses:?}");
        fs::write(scene.path("target.toml"), text.replace("listen = [\"127.0.0.1:0\"]", &listen))
            .unwrap();
    };
    let (one, two) = ("127.0.0.1:0", "127.0.0.2:0");
    let first = scene.address.clone();
    listen(&scene, &[2], &[one, two], "");
    let dry = scene.reload(&["--dry-run"]).ok();
    assert_eq!(dry["added_addresses"][0], serde_json::json!({"address": two, "discovery": false}));
    assert_eq!(records(&scene, &first).len(), 1, "a dry run changes nothing");
    scene.reload(&[]).ok();
    let both = records(&scene, &first);
    assert_eq!((both.len(), &both[1].0[..], both[1].2), (2, "127.0.0.2", 2));
    let second = format!("{}:{}", both[1].0, both[1].1);
    scene.volume("create", 2, &["v"]).ok();

    // All or nothing: an address that is taken, beside one and a namespace that could come.
    let taken = std::net::TcpListener::bind("127.0.0.3:0").unwrap();
    let taken_at = taken.local_addr().unwrap().to_string();
    listen(&scene, &[2, 3], &[one, two, "127.0.0.4:0", &taken_at], "");
    for words in [&["--dry-run"][..], &[]] {
        let words_of_error = [&taken_at, "the port is taken", "serves as before"];
        scene.reload(words).failed(7, &words_of_error);
    }
    assert_eq!(records(&scene, &second), both);
    assert!(!scene.path("d3").exists());

    // An owner is connected through the address that would go.
    let (writer, pipe) = scene.start_writer();
    let ana = "[[ana]]\nport = 1\nstate = \"inaccessible\"\n";
    listen(&scene, &[2], &[two], "");
    for words in [&["--dry-run"][..], &[]] {
        let text = scene.reload(words).failed(4, &[HOST, "open through", &first, "--force"]);
        assert!(text.contains("serves as before"), "{text}");
    }
    assert_eq!(records(&scene, &second), both);
    let forced = scene.reload(&["--force"]).ok();
    assert_eq!(forced["removed_addresses"][0]["address"], one);
    assert!(forced["forced"][0].as_str().unwrap().contains("open through"), "{forced}");
    drop(pipe);
    finish(writer).failed(6, &[]);
    scene.volume("show", 2, &["v"]).failed(3, &[&first]);
    assert_eq!(records(&scene, &second), both[1..], "the id stays");
    scene.address = second.clone();
    scene.volume("recover", 2, &["v", "--take-over", "--acknowledge"]).ok();
    scene.volume("write", 2, &["v", "a"]).ok();
    // The states are those of places in the file.
    listen(&scene, &[2], &[two], ana);
    scene.reload(&[]).ok();
    let words = ["target", "ana", "--control", "control", "-o", "json"];
    let states = rio_in(scene.folder.path(), &words).ok()["states"].clone();
    assert_eq!((&states[0]["port"], &states[0]["state"]), (&1.into(), &"inaccessible".into()));
    scene.volume("verify", 2, &["v", "a"]).failed(4, &[]);
    for line in ["- address 127.0.0.1:0", "+ address 127.0.0.2:0", "+ port 1: inaccessible"] {
        let line = format!("configuration changed: {line}");
        assert!(scene.messages().contains(&line), "{line} in {}", scene.messages());
    }
    scene.stop();
}

#[test]
fn a_host_that_is_removed_loses_its_connections() {
    let both = format!("hosts = [\"{HOST}\", \"{OTHER}\"]");
    let scene = Scene::new(&[1, 2], &both);
    // The first volume of the log is the one that is watched.
    scene.volume("create", 2, &["v"]).ok();
    finish(scene.start("create", 1, OTHER, &["w"])).ok();
    let (writer, pipe) = scene.start_writer();

    scene.config(&[1, 2], &format!("hosts = [\"{OTHER}\"]"));
    let done = scene.reload(&[]).ok();
    assert_eq!(
        (&done["removed_hosts"][0], &done["added_hosts"]),
        (&HOST.into(), &serde_json::json!([]))
    );
    drop(pipe);
    finish(writer).failed(6, &[]);
    scene.volume("show", 2, &["v"]).failed(3, &[]);
    finish(scene.start("show", 1, OTHER, &["w"])).ok();

    scene.config(&[1, 2], "");
    assert_eq!(scene.reload(&[]).ok()["added_hosts"][0], Value::Null, "any host");
    scene.volume("show", 2, &["v"]).ok();
    scene.stop();
}

#[test]
fn hang_up_reloads_a_target_with_a_file() {
    let scene = Scene::new(&[1], "");
    let target = scene.target.as_ref().unwrap();
    signal(target, "-HUP");
    scene.wait_for_message("the configuration is the same");
    scene.config(&[1, 2], "");
    signal(target, "-HUP");
    scene.wait_for_message("the configuration is taken over");
    scene.volume("create", 2, &["v"]).ok();
    scene.config(&[1], "model = \"Other\"");
    signal(target, "-HUP");
    scene.wait_for_message("SIGHUP: the target serves as before");
    scene.volume("show", 2, &["v"]).ok();
    scene.stop();
}

#[test]
fn without_a_file_or_a_socket_there_is_nothing_to_reload() {
    let folder = tempfile::tempdir().unwrap();
    let words =
        ["target", "serve", "-s", "0", "--drive", "mem:16M", "--control", "c", "-o", "json"];
    let (child, _) = served(start_in(folder.path(), &words));
    let reload = |control: &str| {
        rio_in(folder.path(), &["target", "reload", "--control", control, "-o", "json"])
    };
    reload("c").failed(2, &["without a configuration file"]);
    reload("nowhere").failed(3, &["no target at nowhere", "SIGHUP"]);
    finish(start_in(folder.path(), &words)).failed(7, &["another process serves it"]);
    signal(&child, "-TERM");
    assert_eq!(finish(child).code, 0);
}
