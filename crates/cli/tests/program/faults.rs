//! Bad input and faults: each gives a clear error with its exit code, loses nothing, and never
//! hangs.

use std::{fs, io::Read, net::TcpListener, process::Command, thread};

use crate::site::{Done, Site, content, finish, rio, start_in};
use riopipe::{MemberAddr, OpenOptions, Volume};
use riopipe_target::Config;

#[test]
fn a_wrong_address_or_port() {
    // A port that was free a moment ago, without a listener.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let member = format!("127.0.0.1:{port}");
    let done = rio(&["volume", "show", "-m", &member, "-o", "json"]);
    done.failed(3, &[&member, "refused"]);
    let port = port.to_string();
    rio(&["discover", "-a", "127.0.0.1", "-s", &port, "-o", "json"]).failed(3, &["refused"]);
    let nowhere = "no-such-host.invalid";
    rio(&["discover", "-a", nowhere, "-o", "json"]).failed(3, &[nowhere]);
    rio(&["volume", "show", "-m", "host:port", "-o", "json"]).failed(2, &["ADDR[:PORT]"]);
}

#[test]
fn an_unknown_nqn_or_namespace() {
    let site = Site::new(1, "mem:16M,lazy");
    let with = |what: &str| vec!["-m".to_owned(), format!("{}{what}", site.address(0))];
    site.volume_with("create", &["v"], &with(",nqn=nqn.2026-11.com.example:absent"))
        .failed(3, &["nqn.2026-11.com.example:absent", "rio discover"]);
    site.volume_with("create", &["v"], &with(",ns=7")).failed(4, &["ns=7", "no such namespace"]);
}

#[test]
fn a_host_that_may_not_connect() {
    let mut site = Site::new(0, "");
    let mut config = Config::on_loopback(&["mem:16M,lazy"]);
    config.hosts = Some(vec!["nqn.2026-11.com.example:friend".to_owned()]);
    site.add(&config);
    let nqn = site.targets[0].as_ref().unwrap().subnqn().to_owned();
    let member = vec!["-m".to_owned(), format!("{},nqn={nqn}", site.address(0))];
    site.volume_with("create", &["v"], &member).failed(3, &["does not admit host"]);
    let friend = ["v", "-q", "nqn.2026-11.com.example:friend"];
    site.volume_with("create", &friend, &member).ok();
}

#[test]
fn a_peer_that_is_no_target_and_one_that_stalls() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The first connection is answered in another protocol, the second never.
    let peer = thread::spawn(move || {
        let (mut one, _) = listener.accept().unwrap();
        std::io::Write::write_all(&mut one, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        let (mut two, _) = listener.accept().unwrap();
        // Until the program gives up.
        let _ = two.read_to_end(&mut Vec::new());
        let _ = one.read_to_end(&mut Vec::new());
    });
    let port = address.port().to_string();
    let args = ["discover", "-a", "127.0.0.1", "-s", &port, "--timeout", "1", "-o", "json"];
    rio(&args).failed(3, &["127.0.0.1"]);
    rio(&args).failed(3, &["no answer within 1 s"]);
    peer.join().unwrap();
}

#[test]
fn a_namespace_too_small_or_not_whole_blocks() {
    let site = Site::new(1, "mem:64K");
    site.volume("create", &["v"]).failed(4, &["few"]);
    let serve = |drive| rio(&["target", "serve", "-s", "0", "--drive", drive, "-o", "json"]);
    serve("mem:5000").failed(2, &["mem:5000", "multiple of 4096"]);
    serve("tape:9").failed(2, &["unknown kind", "mem:SIZE"]);
    serve("file:/no/such/folder/d,size=1M").failed(7, &["/no/such/folder"]);
    serve("").failed(2, &["no drive"]);
}

#[test]
fn a_file_too_large_for_the_volume() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("small", 1000);
    site.volume("write", &["v", "small"]).ok();
    site.file("large", 17 << 20);
    site.volume("write", &["v", "large"]).failed(4, &["4353 blocks", "larger volume"]);
    // The old file remains.
    site.volume("verify", &["v", "small"]).ok();
}

#[test]
fn a_group_beyond_the_bound_on_buffers() {
    let site = Site::new(1, "mem:256M,lazy");
    site.create();
    site.file("a", 100 << 20);
    site.volume("write", &["v", "a", "--group", "80M"])
        .failed(2, &["can never fit", "nothing was written", "--group 40M"]);
    assert_eq!(site.volume("show", &[]).ok()["state"], "free");
    // Many groups beyond it together: they wait, and are not refused.
    site.volume("write", &["v", "a", "--group", "16M"]).ok();
    site.volume("verify", &["v", "a"]).ok();
}

#[test]
fn local_files_that_cannot_be_read_or_written() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.volume("verify", &["v"]).failed(5, &["holds no file", "rio volume write"]);
    site.volume("write", &["v", "gone"]).failed(1, &["gone", "No such file"]);
    site.volume("write", &["v", "."]).failed(1, &["not a regular file"]);
    site.file("a", 200_000);
    site.volume("write", &["v", "a"]).ok();
    site.volume("read", &["v"]).failed(1, &["already there", "--force"]);
    site.volume("read", &["v", "no/such/folder/a"]).failed(1, &["no/such/folder"]);
    // A file with a size limit, as on a full disk.
    let members = site.members().join(" ");
    let script = format!(
        "trap '' XFSZ; ulimit -f 64; exec {} volume read v b {members} -o json",
        env!("CARGO_BIN_EXE_rio")
    );
    let output =
        Command::new("sh").args(["-c", &script]).current_dir(site.folder.path()).output().unwrap();
    Done::of(output).failed(1, &["b: can't write it", "nothing was left behind"]);
    assert!(!site.path("b").exists());
    let left = fs::read_dir(site.folder.path()).unwrap().flatten();
    let left: Vec<_> = left.map(|e| e.file_name()).filter(|n| n != "a" && n != "log-0").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn members_in_the_wrong_order_missing_or_of_another_volume() {
    let site = Site::new(3, "mem:16M,lazy");
    let two = site.members_in(&[0, 1]);
    site.volume_with("create", &["v"], &two).ok();
    site.volume_with("create", &["w"], &site.members_in(&[2])).ok();
    let open = |order: &[usize]| site.volume_with("verify", &["v"], &site.members_in(order));
    open(&[1, 0]).failed(4, &["order"]);
    open(&[0]).failed(4, &["2 members", "1 were given"]);
    open(&[0, 2]).failed(4, &["\"w\""]);
    site.volume_with("verify", &["x"], &two).failed(4, &["\"v\"", "\"x\""]);
    site.volume_with("create", &["v"], &site.members_in(&[0, 0])).failed(2, &["twice"]);
    // A drive in use is not overwritten by accident.
    site.volume_with("create", &["new"], &site.members_in(&[2])).failed(4, &["\"w\"", "--force"]);
    site.volume_with("create", &["new", "--force"], &site.members_in(&[2])).ok();
    open(&[0, 1]).failed(5, &["holds no file"]);
}

#[test]
fn a_second_owner() {
    let site = Site::new(1, "mem:16M,lazy");
    site.create();
    site.file("a", 1000);
    let member: MemberAddr = site.address(0).parse().unwrap();
    let (volume, _) = Volume::open("v", &[member], &OpenOptions::default()).unwrap();
    assert_eq!(site.volume("show", &[]).ok()["state"], "owned");
    site.volume("write", &["v", "a"]).failed(4, &["owned by", "--take-over"]);
    site.volume("create", &["w", "--force"]).failed(4, &["owned"]);
    site.volume("write", &["v", "a", "--take-over"]).ok();
    // The fenced owner must not report that it closed the volume in order.
    drop(volume);
    site.volume("verify", &["v", "a"]).ok();
}

#[test]
fn an_engine_that_the_volume_cannot_do() {
    let site = Site::with(1, "mem:16M,lazy", "");
    site.volume("create", &["v", "--engine", "rio"]).failed(4, &["engine rio", "log"]);
}

#[test]
fn a_log_too_small_foreign_newer_or_damaged() {
    let site = Site::with(1, "mem:16M,lazy", "64K");
    site.volume("create", &["v", "--streams", "1024"]).failed(4, &["too small", "larger region"]);
    let serve = |log: &str| {
        let log = format!("file:{log}");
        let args = ["target", "serve", "-s", "0", "--drive", "mem:1M", "--log", &log, "-o", "json"];
        rio(&[&args[..], &["--lock-wait", "0.1", "--create"]].concat())
    };
    let new = |name: &str| site.path(name).display().to_string();
    serve(&format!("{},size=8K", new("tiny"))).failed(7, &["small"]);
    serve(&new("missing")).failed(7, &["size="]);
    let text = site.path("text");
    fs::write(&text, "not a log at all\n".repeat(10_000)).unwrap();
    serve(&new("text")).failed(7, &["text"]);
    assert!(fs::read(&text).unwrap().starts_with(b"not a log"), "it was written to");
    // T8: a served log is locked.
    serve(&new("log-0")).failed(7, &["in use by another process"]);
}

/// T19: a target that comes back with another log has no state of the volume, and that is not taken
/// for "nothing to undo".
#[test]
fn a_log_of_another_incarnation() {
    let mut site = Site::new(0, "");
    let drive = format!("file:{},size=16M", site.path("drive").display());
    let mut config = Config::on_loopback(&[&drive]);
    config.subnqn = Some("nqn.2026-11.com.example:moved".to_owned());
    config.log = Some(format!("file:{},size=1M", site.path("log-a").display()));
    site.add(&config);
    site.create();
    site.file("a", 1000);
    site.volume("write", &["v", "a"]).ok();
    site.targets.remove(0).unwrap().stop().unwrap();
    config.log = Some(format!("file:{},size=1M", site.path("log-b").display()));
    site.add(&config);
    site.volume("verify", &["v", "a"]).failed(4, &["log"]);
    site.targets.remove(0).unwrap().stop().unwrap();
    config.log = Some(format!("file:{}", site.path("log-a").display()));
    site.add(&config);
    site.volume("verify", &["v", "a"]).ok();
}

#[test]
fn a_target_killed_in_the_middle_of_a_write() {
    let mut site = Site::new(2, "ssd:flash,size=512M,lazy");
    site.create();
    site.file("a", 600 << 20);
    let members = site.members();
    let mut args = vec!["volume", "write", "v", "a", "-o", "json"];
    args.extend(members.iter().map(String::as_str));
    let child = start_in(site.folder.path(), &args);
    site.wait_until_written(1);
    site.targets[1].take().unwrap().kill();
    let text = finish(child).failed(6, &["stream 0", "volume \"v\""]);
    assert!(text.contains("group"), "{text}");
}

/// An interrupted volume stays closed until it is recovered, after any kind of death, and the error
/// reports it.
#[test]
fn an_interrupted_volume_is_recovered() {
    for initiator_dies in [true, false] {
        let mut site = Site::new(0, "");
        let mut config = Config::on_loopback(&[&format!(
            "ssd:flash,size=512M,file={}",
            site.path("drive").display()
        )]);
        config.subnqn = Some("nqn.2026-11.com.example:cut".to_owned());
        config.log = Some(format!("file:{},size=2M", site.path("log").display()));
        site.add(&config);
        site.create();
        site.file("a", 400 << 20);
        let members = site.members();
        let mut args = vec!["volume", "write", "v", "a", "-o", "json", "--loss-timeout", "0"];
        args.extend(members.iter().map(String::as_str));
        let mut child = start_in(site.folder.path(), &args);
        site.wait_until_written(0);
        if initiator_dies {
            child.kill().unwrap();
            child.wait().unwrap();
        } else {
            site.targets.remove(0).unwrap().kill();
            finish(child).failed(6, &["stream 0"]);
            site.add(&config);
        }
        // It can't be replaced by another volume by accident.
        site.volume("create", &["w"]).failed(4, &["\"v\""]);
        // The target may not have noticed yet that the owner is gone.
        let recovered = site.volume("recover", &["v", "--take-over", "--acknowledge"]).ok();
        assert_eq!(recovered["nothing"], false, "{recovered}");
        assert!(recovered["streams"][0]["found"].as_u64().unwrap() > 0, "{recovered}");
        let again = site.volume("recover", &["v"]).ok();
        assert_eq!(again["nothing"], true, "{again}");
        assert_eq!(again["streams"][0]["last"], recovered["streams"][0]["last"]);
        // An incomplete file counts as none, and the volume is usable again.
        site.volume("verify", &["v"]).failed(5, &["no file"]);
        site.file("b", 100_000);
        site.volume("write", &["v", "b"]).ok();
        site.volume("verify", &["v", "b"]).ok();
    }
}

#[test]
fn a_drive_that_vanishes_while_it_is_served() {
    let mut site = Site::new(0, "");
    let path = site.path("drive");
    let mut config = Config::on_loopback(&[&format!("file:{},size=64M", path.display())]);
    config.log = Some(format!("file:{},size=1M", site.path("log").display()));
    site.add(&config);
    site.create();
    site.file("a", 10 << 20);
    site.volume("write", &["v", "a"]).ok();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    let done = site.volume("write", &["v", "a"]);
    assert!([3, 4, 6].contains(&done.code), "{done:?}");
    assert!(!done.stderr.is_empty());
}

#[test]
fn a_port_in_use() {
    let site = Site::new(1, "mem:16M,lazy");
    let address = site.address(0);
    let port = address.rsplit_once(':').unwrap().1;
    rio(&["target", "serve", "-s", port, "--drive", "mem:1M", "-o", "json"])
        .failed(7, &[&address, "the port is taken"]);
}

#[test]
fn a_file_that_was_damaged_on_the_drive() {
    let mut site = Site::new(0, "");
    let path = site.path("drive");
    let config = Config::on_loopback(&[&format!("file:{},size=16M", path.display())]);
    site.add(&config);
    site.create();
    site.file("a", 1 << 20);
    site.volume("write", &["v", "a"]).ok();
    site.targets.remove(0).unwrap().stop().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    // A block of the file, found by its content.
    let needle = &content(1 << 20)[500_000..500_064];
    let at = bytes.windows(64).position(|window| window == needle).unwrap();
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    site.add(&config);
    site.volume("verify", &["v"]).failed(5, &["damaged"]);
    site.volume("read", &["v", "b"]).failed(5, &["damaged", "checksum"]);
    assert!(!site.path("b").exists());
}
